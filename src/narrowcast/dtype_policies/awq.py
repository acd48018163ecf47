"""AWQ: 4-bit weights, scaled before rounding so that the inputs that matter most lose least."""

from __future__ import annotations

from typing import Any

from narrowcast.dtype_policies.names import Grammar, Setting
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register

__all__ = ["AWQDTypePolicy"]


class AWQDTypePolicy(QuantizedDTypePolicy):
    """AWQ weights, and the float policy they start from.

    Args:
        mode: `"awq/4/<group_size>"`: always 4 bits; how many inputs share a scale, or -1 for all.
        source_name: the float policy to start from, as in `QuantizedDTypePolicy`.

    Example:
        >>> policy = AWQDTypePolicy("awq/4/128", "float32")
        >>> policy, policy.weight_bits, policy.group_size
        (<AWQDTypePolicy "awq/4/128_from_float32">, 4, 128)

    References:
        Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, 2023.
    """

    def __init__(self, mode: str, source_name: Any = None) -> None:
        self._freeze_quantized(mode, source_name)

    @property
    def weight_bits(self) -> int:
        """How many bits a weight has: 4."""
        return int(self._settings["weight_bits"])

    @property
    def group_size(self) -> int:
        """How many inputs share a scale; -1 where all do."""
        return int(self._settings["group_size"])


register(
    Mode(
        Grammar(
            "awq",
            (
                Setting("weight_bits", "4", choices=(4,)),
                Setting("group_size", "-1 (all inputs) or an integer of at least 1", special=(-1,)),
            ),
        ),
        AWQDTypePolicy,
        kinds=("linear", "attention", "experts"),
        summary="4-bit weights, scaled against calibration inputs",
        needs_calibration=True,
    )
)
