"""Embeddings and bags on 8-bit tables against PyTorch's own on the dequantized table."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from narrowcast.plan.carrier import Status
from tests.torch.int8_cases import quantized, randn, verdict


def table(seed=0, **options):
    torch.manual_seed(seed)
    return quantized(nn.Embedding(11, 6, **options))


@pytest.mark.parametrize("indices", [torch.tensor(3), torch.tensor([0, 10, 10]), torch.zeros(2, 0, dtype=torch.int32)])
def test_rows_are_those_of_the_dequantized_table(indices):
    module = table()
    assert torch.equal(module(indices), F.embedding(indices, module.weight))


@pytest.mark.parametrize("policy", ["int8_from_bfloat16", "int8_from_mixed_float16", "int8/weight_from_bfloat16"])
def test_rows_are_rounded_once_to_the_compute_dtype(policy):
    torch.manual_seed(0)
    module = quantized(nn.Embedding(11, 6), policy)
    exact = module.weight_codes.double() * module.weight_scale.double()
    dtype = torch.float16 if "float16" in policy and "bfloat16" not in policy else torch.bfloat16
    assert torch.equal(module(torch.arange(11)), exact.float().to(dtype))


def test_the_padding_row_stays_zero():
    module = table(padding_idx=4)
    assert not module(torch.tensor([4])).any()


def test_an_index_outside_gets_the_error_of_pytorch():
    with pytest.raises(IndexError, match="index out of range"):
        table()(torch.tensor([11]))


def test_max_norm_falls_back_because_it_writes_to_the_table():
    found = verdict(nn.Embedding(11, 6, max_norm=1.0))
    assert found.status is Status.FELL_BACK
    assert found.reason == "max_norm writes into the table at each look-up, and codes are not written to"


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 0, -2])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags_are_those_of_the_dequantized_table(mode, padding_idx, include_last_offset):
    torch.manual_seed(0)
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": include_last_offset}
    module = quantized(nn.EmbeddingBag(11, 6, **options))
    plain = nn.EmbeddingBag(11, 6, **options)
    plain.weight.data = module.weight
    ids = torch.tensor([1, 0, 9, 9, 4, 0, 0, 10, 2])
    offsets = torch.tensor([0, 3, 3, 7, 9] if include_last_offset else [0, 3, 3, 7])
    torch.testing.assert_close(module(ids, offsets), plain(ids, offsets))
    if not include_last_offset:
        torch.testing.assert_close(module(ids.view(3, 3)), plain(ids.view(3, 3)))


def test_bags_take_weights_for_each_sample_and_give_their_gradient():
    torch.manual_seed(0)
    module = quantized(nn.EmbeddingBag(11, 6, mode="sum"))
    plain = nn.EmbeddingBag(11, 6, mode="sum")
    plain.weight.data = module.weight
    ids = torch.tensor([[1, 0, 9], [9, 4, 4]])
    ours, theirs = (randn(2, 3).requires_grad_() for _ in range(2))
    y = module(ids, per_sample_weights=ours)
    torch.testing.assert_close(y, plain(ids, per_sample_weights=theirs))
    y.sum().backward()
    plain(ids, per_sample_weights=theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_empty_bags_are_empty():
    module = quantized(nn.EmbeddingBag(11, 6, mode="sum"))
    y = module(torch.zeros(0, dtype=torch.long), torch.tensor([0, 0]))
    assert torch.equal(y, torch.zeros(2, 6))
