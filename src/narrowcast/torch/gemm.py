"""Which floats this CPU multiplies fast, and what runs in place of the others.

A CPU without instructions for a 16-bit float multiplies matrices of it ten to several hundred times slower than
float32, the backward pass most of all. There, layers round their operands to the 16-bit dtype, multiply them in
float32 and round the result: the values of a 16-bit multiplication with a float32 accumulator, at float32's speed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["ARITHMETIC", "describe_gemm", "is_slow", "slow_on_cpu"]

ARITHMETIC = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
"""The dtypes that PyTorch computes in, by name."""


@lru_cache(maxsize=1)
def slow_on_cpu() -> frozenset[torch.dtype]:
    """Returns the dtypes that this machine's CPU has no fast matrix multiplication for; asked of oneDNN once.

    Example:
        >>> slow_on_cpu() <= {torch.float16, torch.bfloat16}
        True
    """
    probes = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}
    return frozenset(dtype for dtype, probe in probes.items() if not _ask(probe))


def _ask(probe: str) -> bool:
    # A build without oneDNN has no such operator, and no fast 16-bit multiplication either.
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError):
        return False


SLOW_ON_CPU = slow_on_cpu()
"""`slow_on_cpu()` as a plain value, so that `torch.compile` reads it as a constant."""


def is_slow(x: Tensor, dtype: torch.dtype) -> bool:
    """Says whether the device of `x` multiplies `dtype` slower than float32."""
    return dtype in SLOW_ON_CPU and x.device.type == "cpu"


def describe_gemm(dtype: str, device: str, *, widens: bool) -> str:
    """Says in words how a layer whose arithmetic is a matrix multiplication runs in `dtype`.

    Args:
        dtype: the compute dtype by name.
        device: the device of the layer's parameters; anything that is no accelerator counts as the CPU.
        widens: whether the layer multiplies in float32 where `dtype` is slow.

    Example:
        >>> describe_gemm("float32", "cpu", widens=True)
        'float32 gemm'
    """
    on_cpu = device.partition(":")[0] in ("", "cpu", "meta")
    if not on_cpu or ARITHMETIC.get(dtype) not in SLOW_ON_CPU:
        return f"{dtype} gemm"
    if widens:
        return f"float32 gemm rounded to {dtype} (this CPU has no fast {dtype} gemm)"
    return f"{dtype} gemm, slow on this CPU"
