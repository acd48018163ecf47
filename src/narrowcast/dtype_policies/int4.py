"""int4: weights of 4 bits, with a scale for each output channel or each group of inputs."""

from __future__ import annotations

from typing import Any

from narrowcast.dtype_policies.names import Grammar, Setting
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register

__all__ = ["Int4DTypePolicy"]


class Int4DTypePolicy(QuantizedDTypePolicy):
    """4-bit weights, and the float policy they start from.

    Args:
        mode: `"int4/<block_size>"`: how many inputs share a scale, or -1 for one scale for each output channel.
        source_name: the float policy to start from, as in `QuantizedDTypePolicy`.

    Example:
        >>> policy = Int4DTypePolicy("int4/128", "mixed_bfloat16")
        >>> policy, policy.block_size
        (<Int4DTypePolicy "int4/128_from_mixed_bfloat16">, 128)
    """

    def __init__(self, mode: str, source_name: Any = None) -> None:
        self._freeze_quantized(mode, source_name)

    @property
    def block_size(self) -> int:
        """How many inputs share a scale; -1 where each output channel has one scale."""
        return int(self._settings["block_size"])


register(
    Mode(
        Grammar("int4", (Setting("block_size", "-1 (per channel) or an integer of at least 1", special=(-1,)),)),
        Int4DTypePolicy,
        kinds=("linear", "attention", "experts", "embedding"),
        summary="4-bit weights with a scale for each group of inputs",
        # Keras 3.12 and older had no groups; Keras 3.13 wrote "no group" as None.
        old_spellings=(("int4", "int4/-1"), ("int4/None", "int4/-1")),
    )
)
