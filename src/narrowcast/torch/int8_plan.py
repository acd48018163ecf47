"""What plans say of 8-bit layers: the kernel, whether it is faster than what runs now, and what it keeps in memory.

The judgements come from the measurements in `docs/int8.md`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member, Parameter
from narrowcast.torch import cpu_kernels
from narrowcast.torch.gemm import ARITHMETIC, SLOW_ON_CPU
from narrowcast.torch.int8_gemm import PACKED_STEP

__all__ = ["describe_int8", "describe_weights", "describe_weights_only"]

SMALL_WEIGHT = 2**16
"""Below so many elements, quantizing the input of a linear layer alone takes longer than float32, at up to 32 rows."""

_ROWS = "each row of activations quantized as it comes"


def describe_int8(
    member: Member, policy: DTypePolicy, device: str, weights: Iterable[Parameter]
) -> tuple[str, str, int]:
    """Says what runs where weights and activations are 8-bit codes.

    Args:
        member: the module.
        policy: its policy, the source resolved.
        device: where its parameters are; on the meta device the answer is for this machine's CPU.
        weights: the weights that are multiplied.

    Returns:
        The kernel in words; what to know before, or `''`; and the bytes that kernels derive from the weights.
    """
    kind = _kind(device)
    num_weights = sum(weight.num_elements for weight in weights)
    if kind == "cuda":
        fits = all(length % 8 == 0 for weight in weights for length in weight.shape)
        if not fits:
            return f"float32 gemm on the codes, {_ROWS}", "no faster: its sizes are not multiples of 8", 0
        return (
            f"cuBLAS int8 gemm, {_ROWS}",
            "up to 16 rows are multiplied in float32 on the codes",
            0,
        )
    found = cpu_kernels.cpu_kernels() if kind == "cpu" else cpu_kernels.CpuKernels(False, None, None)
    if found.many is None:
        return f"float32 gemm on the codes, {_ROWS}", "no faster: there is no 8-bit kernel here", 0
    if found.many is cpu_kernels.Spread:
        reason = "no faster than float32 for many rows: this CPU has no 8-bit dot product (VNNI)"
        # Weights are spread over one and a half times as many positions, twice as many at the most.
        return f"FBGEMM u8s8 gemm, {_ROWS}", "" if _is_slow_now(member) else reason, 2 * num_weights
    reason = f"too small to be faster: fewer than {SMALL_WEIGHT:,} weights" if num_weights < SMALL_WEIGHT else ""
    names = {cpu_kernels.OneDnn: "oneDNN", cpu_kernels.Fbgemm: "FBGEMM"}
    used = dict.fromkeys((found.few, found.many))
    words = " or ".join(names[kernel] for kernel in used if kernel in names)
    return f"{words} u8s8 gemm, {_ROWS}", reason, num_weights * len(used)


def describe_weights(
    member: Member, policy: DTypePolicy, device: str, weights: Iterable[Parameter]
) -> tuple[str, str, int]:
    """Says what runs where weights are codes and activations floats. Arguments and result as in `describe_int8`."""
    dtype = ARITHMETIC[str(policy.compute_dtype)]
    if _kind(device) != "cpu":
        return f"{policy.compute_dtype} gemm on weights dequantized at each call", "smaller, not faster", 0
    if dtype is torch.bfloat16 and all(weight.shape[-1] % PACKED_STEP == 0 for weight in weights):
        kernel = "_weight_int8pack_mm up to 4 rows, else weights dequantized at each call"
        return kernel, "" if _is_slow_now(member) else "faster up to 4 rows, not above", 0
    wide = "float32" if dtype in SLOW_ON_CPU else str(policy.compute_dtype)
    reason = "" if _is_slow_now(member) else "smaller, not faster"
    return f"{wide} gemm on weights dequantized at each call", reason, 0


def describe_weights_only(arithmetic: str, *, is_told: bool) -> tuple[str, str, int]:
    """Says what runs at layers of which only the weights are quantized, in either mode.

    Args:
        arithmetic: what is done with the dequantized weights, in words.
        is_told: whether to say that activations stay floats, as the mode's name does not.
    """
    reason = "weights only; smaller, not faster" if is_told else "smaller, not faster"
    return f"{arithmetic} on weights dequantized at each call", reason, 0


def _kind(device: str) -> str:
    kind = device.partition(":")[0]
    return "cpu" if kind in ("", "meta") else kind


def _is_slow_now(member: Member) -> bool:
    """Whether the layer multiplies now in a dtype that this CPU is slow in, which anything is faster than."""
    if member.policy is not None and member.policy.quantization_mode is None:
        return False  # a float policy multiplies in float32 there
    now = {parameter.dtype for parameter in member.parameters if parameter.name.endswith("weight")}
    return any(ARITHMETIC.get(name) in SLOW_ON_CPU for name in now)
