"""MX: floats of 8, 6 or 4 bits that share a power of two in blocks of 32."""

from __future__ import annotations

from narrowcast.dtype_policies.names import Grammar
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register

__all__ = ["MXDTypePolicy"]


class MXDTypePolicy(QuantizedDTypePolicy):
    """A microscaling (MX) mode and the float policy it starts from.

    Args:
        mode: `"mxfp8"`, `"mxfp6"` or `"mxfp4"`: weights and activations; with `"/weight"`: weights only.
        source_name: the float policy to start from, as in `QuantizedDTypePolicy`.

    Example:
        >>> MXDTypePolicy("mxfp4/weight", "bfloat16")
        <MXDTypePolicy "mxfp4/weight_from_bfloat16">

    References:
        OCP Microscaling Formats (MX) Specification 1.0, 2023.
    """


for _bits in (8, 6, 4):
    register(
        Mode(
            Grammar(f"mxfp{_bits}"),
            MXDTypePolicy,
            kinds=("linear", "attention", "experts"),
            summary=f"{_bits}-bit floats in blocks of 32, weights and activations",
        )
    )
    register(
        Mode(
            Grammar(f"mxfp{_bits}/weight"),
            MXDTypePolicy,
            kinds=("linear", "attention", "experts", "embedding"),
            summary=f"{_bits}-bit floats in blocks of 32, weights only",
        )
    )
