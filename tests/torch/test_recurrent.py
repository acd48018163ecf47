"""Recurrent layers under float policies: layers, directions, packed input, states, and their flat list of weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from .floats import packed, put, randn


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16", "float64"])
def test_outputs_and_states_have_the_compute_dtype(make, policy):
    layer = put(make(6, 4, 2, bidirectional=True), policy)
    expected = torch.float64 if policy == "float64" else torch.bfloat16 if "b" in policy else torch.float16
    out, state = layer(packed())
    states = state if isinstance(state, tuple) else (state,)
    assert {out.data.dtype, *(s.dtype for s in states)} == {expected}


def test_state_in_float32_is_taken_and_returned_in_the_compute_dtype():
    layer = put(nn.GRU(6, 4), "mixed_bfloat16")
    x, state = randn(5, 3, 6), torch.zeros(1, 3, 4)
    for _ in range(3):
        out, state = layer(x, state)
        assert (out.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16)


def test_flat_weights_are_the_masters_after_a_call():
    layer = put(nn.LSTM(6, 4), "mixed_bfloat16")
    layer(randn(5, 3, 6))[0].float().sum().backward()
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    assert layer.weight_ih_l0.grad.dtype is torch.float32


def test_training_step_changes_the_output():
    layer = put(nn.LSTM(6, 4), "mixed_bfloat16")
    x = randn(5, 3, 6)
    before = layer(x)[0]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before.float().pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(layer(x)[0], before)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_after_a_call_give_the_same(clone):
    layer = put(nn.GRU(6, 4), "mixed_float16")
    x = randn(5, 3, 6)
    expected = layer(x)[0]
    assert torch.equal(clone(layer)(x)[0], expected)


def test_conversion_of_the_model_leaves_a_recurrent_layer():
    layer = put(nn.LSTM(6, 4), "mixed_bfloat16").half()
    assert layer._flat_weights[0] is layer.weight_ih_l0
    assert layer(randn(5, 3, 6))[0].dtype is torch.bfloat16


def test_batches_of_zero_and_sequences_of_one():
    layer = put(nn.GRU(6, 4, batch_first=True), "mixed_bfloat16")
    assert layer(randn(2, 1, 6))[0].shape == (2, 1, 4)
    assert layer(randn(0, 3, 6))[0].shape == (0, 3, 4)


def test_export_leaves_the_weights_in_place():
    layer = put(nn.GRU(6, 4), "mixed_bfloat16").eval()
    x = randn(5, 3, 6)
    expected = layer(x)[0]
    program = torch.export.export(layer, (x,), strict=False)
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    assert torch.equal(layer(x)[0], expected)
    # Decomposed into the operators of single steps, rounded to bfloat16 at up to twenty places.
    assert torch.allclose(program.module()(x)[0].float(), expected.float(), atol=20 * 2.0**-8)


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 4)

    def forward(self, xs):
        state = None
        for x in xs:
            state = self.cell(x, state)
        return state


def test_cell_stepped_by_hand_keeps_one_dtype():
    model = Stepping()
    put(model.cell, "mixed_bfloat16")
    assert {s.dtype for s in model(randn(5, 3, 6))} == {torch.bfloat16}
