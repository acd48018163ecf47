"""`nn.MultiheadAttention` under float policies: one site with its `out_proj`, masks, fast path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from narrowcast.torch.scheme import original_class

from .floats import put, randn


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return put(nn.MultiheadAttention(8, 2, batch_first=True), "mixed_bfloat16")


def test_output_projection_is_cast_though_its_forward_never_runs(attention):
    x = randn(2, 5, 8)
    out, weights = attention(x, x, x)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16)
    out.float().sum().backward()
    assert attention.out_proj.weight.grad.dtype is torch.float32
    assert original_class(attention.out_proj) is type(nn.MultiheadAttention(8, 2).out_proj)


def test_queries_keys_and_values_of_three_dtypes_are_taken(attention):
    x = randn(2, 5, 8)
    expected = attention(x, x, x)[0]
    out = attention(x.half().float().half(), x.bfloat16(), x)[0]
    assert out.dtype is torch.bfloat16
    # The query was rounded to float16 before; its own rounding, 2**-11, is an eighth of bfloat16's.
    assert torch.allclose(out.float(), expected.float(), atol=4 * 2.0**-8 * expected.abs().max().item())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16", "float64"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_eval_mode_gives_the_values_of_training_mode(policy, batch_first):
    torch.manual_seed(0)
    module = put(nn.MultiheadAttention(8, 2, batch_first=batch_first), policy)
    x = randn(2, 5, 8)
    expected = module(x, x, x)[0]
    with torch.no_grad():
        out = module.eval()(x, x, x)[0]
    assert out.dtype is expected.dtype
    # PyTorch's fused operator rounds at other places: six roundings on either side.
    unit = torch.finfo(out.dtype).eps / 2
    assert (out - expected).abs().max() <= 12 * unit * expected.abs().max()


def test_boolean_and_additive_masks_mean_the_same():
    torch.manual_seed(0)
    attention = put(nn.MultiheadAttention(8, 2, batch_first=True), "mixed_float16")
    x = randn(2, 5, 8)
    drop = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    additive = torch.zeros(5, 5).masked_fill(drop, -1e9)
    by_bool = attention(x, x, x, attn_mask=drop)[1]
    by_float = attention(x, x, x, attn_mask=additive)[1]
    assert torch.equal(by_bool, by_float)
    assert torch.equal(by_float.ne(0).any(0), ~drop)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_row_masked_as_a_whole_by_a_finite_mask_stays_finite(policy):
    attention = put(nn.MultiheadAttention(8, 2, batch_first=True), policy)
    x = randn(2, 5, 8)
    padding = torch.zeros(2, 5)
    padding[1] = torch.finfo(torch.float32).min
    out, weights = attention(x, x, x, key_padding_mask=padding)
    assert torch.isfinite(out).all()
    # A mean over five keys; each weight is one rounding of the compute dtype away.
    assert torch.allclose(weights[1].float().sum(-1), torch.ones(5), atol=5 * torch.finfo(out.dtype).eps)


def test_copy_shares_no_parameter(attention):
    twin = copy.deepcopy(attention)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in attention.parameters()}
    x = randn(2, 5, 8)
    assert torch.equal(twin(x, x, x)[0], attention(x, x, x)[0])


def test_subclass_with_its_own_forward_reads_a_cast_output_projection():
    class Twice(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0] * 2

    module = put(Twice(8, 2), "mixed_bfloat16")
    assert module(randn(5, 2, 8)).dtype is torch.bfloat16


def test_unbatched_input_works(attention):
    x = randn(5, 8)
    assert attention(x, x, x)[0].shape == (5, 8)
