"""Embeddings: outputs in the compute dtype, the table renormalized and trained in the variable dtype."""

from __future__ import annotations

import torch
from torch import nn

from .floats import put, randn

IDS = torch.tensor([[1, 2], [2, 0]])


def test_output_can_be_added_to_another_branch():
    embedding, linear = put(nn.Embedding(5, 4), "mixed_bfloat16"), put(nn.Linear(3, 4), "mixed_bfloat16")
    assert (embedding(IDS) + linear(randn(2, 2, 3))).dtype is torch.bfloat16


def test_rows_are_those_of_the_cast_table():
    embedding = put(nn.Embedding(5, 4), "mixed_float16")
    assert torch.equal(embedding(IDS), embedding.weight.half()[IDS])


def test_table_is_renormalized_in_place_in_float32():
    embedding = put(nn.Embedding(5, 4, max_norm=0.1), "mixed_bfloat16")
    embedding(IDS)
    # float32's own rounding of a norm of four terms.
    assert (embedding.weight[:3].norm(dim=1) <= 0.1 * (1 + 8 * 2.0**-24)).all()
    assert (embedding.weight[3:].norm(dim=1) > 0.1).all()


def test_gradients_of_a_row_used_often_are_summed_in_float32():
    embedding = put(nn.Embedding(5, 1), "mixed_bfloat16")
    # 300 ones cannot be counted in bfloat16, whose integers end at 256.
    embedding(torch.ones(300, dtype=torch.long)).sum().backward()
    assert embedding.weight.grad[1].item() == 300


def test_sparse_gradients_work():
    embedding = put(nn.Embedding(5, 4, sparse=True), "mixed_bfloat16")
    embedding(IDS).sum().backward()
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.dtype is torch.float32


def test_padding_row_gets_no_gradient():
    embedding = put(nn.Embedding(5, 4, padding_idx=0), "mixed_bfloat16")
    embedding(IDS).sum().backward()
    assert torch.equal(embedding.weight.grad[0], torch.zeros(4))


def test_bag_by_name_and_offsets():
    bag = put(nn.EmbeddingBag(5, 4, mode="sum"), "mixed_float16")
    out = bag(input=IDS.flatten(), offsets=torch.tensor([0, 2]), per_sample_weights=torch.ones(4).half())
    assert out.dtype is torch.float16
    assert torch.equal(out, bag.weight[IDS].sum(1).half())
