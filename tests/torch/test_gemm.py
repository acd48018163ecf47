"""Which dtypes count as slow on a CPU, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from narrowcast.torch import gemm


@pytest.fixture
def asked(monkeypatch):
    gemm.slow_on_cpu.cache_clear()
    yield monkeypatch
    gemm.slow_on_cpu.cache_clear()


def test_float32_and_float64_are_never_slow():
    assert gemm.slow_on_cpu() <= {torch.float16, torch.bfloat16}


def test_what_onednn_does_not_support_is_slow(asked):
    asked.setattr(gemm, "_ask", lambda probe: probe == "_is_mkldnn_bf16_supported")
    assert gemm.slow_on_cpu() == {torch.float16}


def test_build_without_onednn_multiplies_no_16_bit_floats_fast(asked):
    asked.setattr(torch.ops, "mkldnn", object())
    assert gemm.slow_on_cpu() == {torch.float16, torch.bfloat16}


def test_tensors_on_other_devices_are_not_slow(monkeypatch):
    monkeypatch.setattr(gemm, "SLOW_ON_CPU", frozenset({torch.float16}))
    assert gemm.is_slow(torch.ones(1), torch.float16)
    assert not gemm.is_slow(torch.ones(1), torch.bfloat16)
    assert not gemm.is_slow(torch.ones(1, device="meta"), torch.float16)


@pytest.mark.parametrize(
    "device, widens, words",
    [
        ("cpu", True, "float32 gemm rounded to float16 (this CPU has no fast float16 gemm)"),
        ("meta", True, "float32 gemm rounded to float16 (this CPU has no fast float16 gemm)"),
        ("", False, "float16 gemm, slow on this CPU"),
        ("cuda:1", True, "float16 gemm"),
    ],
)
def test_words_follow_the_device(monkeypatch, device, widens, words):
    monkeypatch.setattr(gemm, "SLOW_ON_CPU", frozenset({torch.float16}))
    assert gemm.describe_gemm("float16", device, widens=widens) == words
