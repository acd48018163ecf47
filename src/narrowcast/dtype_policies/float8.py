"""float8: training with float8 multiplications, and inference from weights stored as float8."""

from __future__ import annotations

from typing import Any

from narrowcast.dtype_policies import registry
from narrowcast.dtype_policies.names import Choice, Grammar, Setting, split_name
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import Mode, register
from narrowcast.errors import PolicyError

__all__ = ["QuantizedFloat8DTypePolicy"]

_HISTORY = Setting(
    "amax_history_length", "an integer of at least 1, and at most 1,048,576", default=1024, maximum=2**20
)
# With more, the scale of the largest float32 would be so small that its reciprocal is infinite.
_MARGIN = Setting("margin", "an integer from 0 to 8", default=0, minimum=0, maximum=8)
_ALGORITHM = Choice("amax_compute_algo", ("max", "most_recent"), "max")
_WIDE_GRADIENT = Choice("high_precision_weight_gradient", (False, True), False)


class QuantizedFloat8DTypePolicy(QuantizedDTypePolicy):
    """A float8 mode and the float policy it starts from.

    The mode `float8` trains: multiplications in float8, scaled by the largest magnitudes of former steps. Other modes
    keep no history: `float8/current`, `float8/rowwise` and `float8/block` train too; `float8/static`, `float8/dynamic`
    and `float8/weight` store the weights as float8 for inference.

    It is made in one of two forms::

        QuantizedFloat8DTypePolicy(name, amax_history_length=1024)
        QuantizedFloat8DTypePolicy(mode, source_name, amax_history_length)

    Args:
        name: `"float8_from_<float policy>"`, or the name of a float policy, which then means `"float8_from_<name>"`. A
            mode alone starts from the global policy.
        source_name: in the second form, the float policy to start from, as `DTypePolicy` takes it, or `"keep"`.
        amax_history_length: for how many steps the largest magnitudes are remembered, at least 1; 1024 where it is not
            given. A long history keeps scales steady, a short one follows a change faster. Only for the mode `float8`.
        margin: powers of two to stay below the largest value, from 0 to 8; 0 where it is not given. Only for `float8`.
        amax_compute_algo: whether the scale comes from the `"max"` of the history or from the `"most_recent"` step;
            `"max"` where it is not given. Only for `float8`.
        high_precision_weight_gradient: whether the gradient of the weight is multiplied in the compute dtype and not in
            float8, for models that need it more exact; `False` where it is not given. Only for modes that train.
        mode: the mode, in place of `name`.

    Raises:
        PolicyTypeError: an argument has the wrong type; a bool is no length.
        PolicyError: the mode is not one of float8, a number is too small, or the mode keeps no history.

    Example:
        >>> QuantizedFloat8DTypePolicy("mixed_bfloat16", amax_history_length=16)
        <QuantizedFloat8DTypePolicy "float8_from_mixed_bfloat16", amax_history_length=16>
        >>> QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", 16).amax_history_length
        16
    """

    default_amax_history_length = 1024

    def __init__(
        self,
        name: Any = None,
        source_name: Any = None,
        amax_history_length: Any = None,
        *,
        margin: Any = None,
        amax_compute_algo: Any = None,
        high_precision_weight_gradient: Any = None,
        mode: Any = None,
    ) -> None:
        if name is None and mode is None:
            raise TypeError("QuantizedFloat8DTypePolicy needs a name or a mode, such as 'float8_from_float32'.")
        if hasattr(type(source_name), "__index__"):  # the second position of the first form
            if amax_history_length is not None:
                raise TypeError("QuantizedFloat8DTypePolicy got two values for amax_history_length.")
            source_name, amax_history_length = None, source_name
        if mode is None:
            mode, source_name = _mode_and_source(name, source_name)
        elif name is not None:
            raise TypeError("QuantizedFloat8DTypePolicy takes a name or a mode, not both.")
        options = {
            "amax_history_length": amax_history_length,
            "margin": margin,
            "amax_compute_algo": amax_compute_algo,
            "high_precision_weight_gradient": high_precision_weight_gradient,
        }
        given = {name: value for name, value in options.items() if value is not None}
        self._freeze_quantized(mode, source_name, **given)

    @property
    def amax_history_length(self) -> int | None:
        """For how many steps the largest magnitudes are remembered; `None` for modes that keep no history."""
        return self._settings.get("amax_history_length")

    @property
    def margin(self) -> int | None:
        """Powers of two to stay below the largest value; `None` for modes that keep no history."""
        return self._settings.get("margin")

    @property
    def amax_compute_algo(self) -> str | None:
        """What of the history the scale comes from: `max` or `most_recent`; `None` for modes that keep no history."""
        return self._settings.get("amax_compute_algo")

    @property
    def high_precision_weight_gradient(self) -> bool | None:
        """Whether the weight's gradient is multiplied in the compute dtype; `None` for modes that do not train."""
        return self._settings.get("high_precision_weight_gradient")


def _mode_and_source(name: Any, source_name: Any) -> tuple[Any, Any]:
    """Reads the first argument: a mode, a whole name, or a float policy in place of a whole name."""
    if not isinstance(name, str):
        return ("float8", name) if source_name is None else (name, source_name)
    mode, source = split_name(name)
    if source is not None and source_name is not None:
        raise PolicyError(
            "Source is given twice", got={"name": name, "source_name": source_name}, expected="one source"
        )
    if source is not None:
        return mode, source
    if source_name is None and registry.find_mode(name) is None:
        return "float8", name
    return name, source_name


_TRAINED = ("linear", "attention", "experts")
_STORED = ("linear", "attention", "experts", "embedding", "conv")

for _mode in (
    Mode(
        Grammar("float8"),
        QuantizedFloat8DTypePolicy,
        kinds=_TRAINED,
        options=(_HISTORY, _MARGIN, _ALGORITHM, _WIDE_GRADIENT),
        is_trainable=True,
        summary="trains with float8 multiplications, scaled by a history of largest magnitudes",
    ),
    Mode(
        Grammar("float8/current"),
        QuantizedFloat8DTypePolicy,
        kinds=_TRAINED,
        options=(_WIDE_GRADIENT,),
        is_trainable=True,
        summary="trains with float8 multiplications, scaled by each tensor's largest magnitude",
    ),
    Mode(
        Grammar("float8/rowwise"),
        QuantizedFloat8DTypePolicy,
        kinds=_TRAINED,
        options=(_WIDE_GRADIENT,),
        is_trainable=True,
        summary="trains with float8 multiplications, scaled by each row's largest magnitude",
    ),
    Mode(
        Grammar("float8/block"),
        QuantizedFloat8DTypePolicy,
        kinds=_TRAINED,
        options=(_WIDE_GRADIENT,),
        is_trainable=True,
        summary="trains with float8 multiplications, scaled by each block's largest magnitude",
    ),
    Mode(
        Grammar("float8/static"),
        QuantizedFloat8DTypePolicy,
        kinds=_TRAINED,
        needs_calibration=True,
        summary="float8 weights, activations in float8 by calibrated scales",
    ),
    Mode(
        Grammar("float8/dynamic"),
        QuantizedFloat8DTypePolicy,
        kinds=_TRAINED,
        summary="float8 weights, activations in float8 by scales found as they come",
    ),
    Mode(Grammar("float8/weight"), QuantizedFloat8DTypePolicy, kinds=_STORED, summary="float8 weights"),
):
    register(_mode)
