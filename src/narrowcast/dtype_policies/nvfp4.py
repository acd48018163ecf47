"""NVFP4: floats of 4 bits that share a float8 scale in blocks of 16, under one float32 scale for the tensor."""

from __future__ import annotations

from narrowcast.dtype_policies.names import Grammar
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register

__all__ = ["NVFP4DTypePolicy"]


class NVFP4DTypePolicy(QuantizedDTypePolicy):
    """The mode NVFP4 and the float policy it starts from.

    Args:
        mode: `"nvfp4"`: weights and activations; `"nvfp4/weight"`: weights only.
        source_name: the float policy to start from, as in `QuantizedDTypePolicy`.

    Example:
        >>> NVFP4DTypePolicy("nvfp4", "bfloat16")
        <NVFP4DTypePolicy "nvfp4_from_bfloat16">

    References:
        NVIDIA, Pretraining Large Language Models with NVFP4, 2025.
    """


register(
    Mode(
        Grammar("nvfp4"),
        NVFP4DTypePolicy,
        kinds=("linear", "attention", "experts"),
        summary="4-bit floats in blocks of 16, weights and activations",
    )
)
register(
    Mode(
        Grammar("nvfp4/weight"),
        NVFP4DTypePolicy,
        kinds=("linear", "attention", "experts", "embedding"),
        summary="4-bit floats in blocks of 16, weights only",
    )
)
