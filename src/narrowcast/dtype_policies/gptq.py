"""GPTQ: weights of few bits, rounded one after the other so that later ones make up for the error of former ones."""

from __future__ import annotations

from typing import Any

from narrowcast.dtype_policies.names import Grammar, Setting
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register

__all__ = ["GPTQDTypePolicy"]


class GPTQDTypePolicy(QuantizedDTypePolicy):
    """GPTQ weights, and the float policy they start from.

    Args:
        mode: `"gptq/<weight_bits>/<group_size>"`: 2, 3, 4 or 8 bits; how many inputs share a scale, or -1 for all.
        source_name: the float policy to start from, as in `QuantizedDTypePolicy`.

    Example:
        >>> policy = GPTQDTypePolicy("gptq/4/128", "float32")
        >>> policy, policy.weight_bits, policy.group_size
        (<GPTQDTypePolicy "gptq/4/128_from_float32">, 4, 128)

    References:
        Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2022.
    """

    def __init__(self, mode: str, source_name: Any = None) -> None:
        self._freeze_quantized(mode, source_name)

    @property
    def weight_bits(self) -> int:
        """How many bits a weight has."""
        return int(self._settings["weight_bits"])

    @property
    def group_size(self) -> int:
        """How many inputs share a scale; -1 where all do."""
        return int(self._settings["group_size"])


register(
    Mode(
        Grammar(
            "gptq",
            (
                Setting("weight_bits", "2, 3, 4 or 8", choices=(2, 3, 4, 8)),
                Setting("group_size", "-1 (all inputs) or an integer of at least 1", special=(-1,)),
            ),
        ),
        GPTQDTypePolicy,
        kinds=("linear", "attention", "experts"),
        summary="weights of few bits, rounded against calibration inputs",
        needs_calibration=True,
    )
)
