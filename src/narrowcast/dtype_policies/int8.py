"""int8: weights of 8 bits, symmetric for each output channel, with or without 8-bit activations."""

from __future__ import annotations

from narrowcast.dtype_policies.names import Grammar
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register

__all__: list[str] = []  # the policies are of `QuantizedDTypePolicy` itself, as in Keras

_KINDS = ("linear", "attention", "embedding", "conv")

register(
    Mode(
        Grammar("int8"),
        QuantizedDTypePolicy,
        kinds=_KINDS,
        summary="8-bit weights, activations quantized to 8 bits for each token as they come",
    )
)
register(Mode(Grammar("int8/weight"), QuantizedDTypePolicy, kinds=_KINDS, summary="8-bit weights"))
