"""`QuantizedDTypePolicy`: a quantization mode and the float policy it starts from; the base of all others."""

from __future__ import annotations

from typing import Any, Self

from narrowcast.dtype_policies import dtypes, registry
from narrowcast.dtype_policies.names import join_name
from narrowcast.dtype_policies.policy import DTypePolicy, global_source
from narrowcast.errors import PolicyError

__all__ = ["QuantizedDTypePolicy"]


class QuantizedDTypePolicy(DTypePolicy):
    """A quantization mode and the float policy it starts from.

    Used as it is for the modes `int8` and `int8/weight`; each other family of modes has a subclass, and a class accepts
    only its own modes. `narrowcast.dtype_policies.get` finds the class for any name.

    Args:
        mode: the mode with its numbers: `"int8"`, `"int4/128"`.
        source_name: the float policy to start from, as `DTypePolicy` takes it, or `"keep"`: whatever the layer has.
            `None` takes the global policy (its source, where that is quantized).

    Raises:
        PolicyTypeError: `mode` is not text, or `source_name` is not text, a dtype or a policy.
        PolicyError: the mode is unknown or belongs to another class, or the source does not compute in floats.

    Example:
        >>> policy = QuantizedDTypePolicy("int8", "mixed_bfloat16")
        >>> policy
        <QuantizedDTypePolicy "int8_from_mixed_bfloat16">
        >>> policy.quantization_mode, policy.compute_dtype, policy.source
        ('int8', 'bfloat16', <DTypePolicy "mixed_bfloat16">)
    """

    _mode_text: str
    _settings: dict[str, Any]
    _source: DTypePolicy

    def __init__(self, mode: str, source_name: Any = None) -> None:
        self._freeze_quantized(mode, source_name)

    def _freeze_quantized(self, mode: Any, source: Any, **options: Any) -> None:
        """Checks and sets the fields of a policy under construction.

        Args:
            mode: the mode with its numbers.
            source: the source, in any form.
            options: settings that are not in the name; those that are not given have their default.
        """
        record, numbers = _own_mode(type(self), mode)
        mode_text = record.grammar.format(numbers)
        source = _float_source(source)
        self._freeze(
            mode_name=record.name,
            mode_text=mode_text,
            settings=numbers | record.complete(options),
            source=source,
            name=join_name(mode_text, source.name),
            compute_dtype=source.compute_dtype,
            variable_dtype=source.variable_dtype,
        )

    @property
    def quantization_mode(self) -> str:
        """The name of the mode, without its numbers: `int8`, `float8/current`, `gptq`."""
        return self._mode_name

    @property
    def mode(self) -> str:
        """The same as `quantization_mode`, under the name it has in Keras' int4, GPTQ and AWQ policies."""
        return self._mode_name

    @property
    def source(self) -> DTypePolicy:
        """The float policy that this one starts from, or `keep`."""
        return self._source

    def with_source(self, source: Any) -> Self:
        """Returns the same mode, with the same settings, from another float policy.

        Example:
            >>> QuantizedDTypePolicy("int8", "keep").with_source("bfloat16")
            <QuantizedDTypePolicy "int8_from_bfloat16">
        """
        return self.from_config(self.get_config() | {"source_name": source})

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal policy, as plain JSON values."""
        return {"mode": self._mode_text, "source_name": self._source.name, **self._options()}

    def _options(self) -> dict[str, Any]:
        """The settings that the name does not carry."""
        return {option.name: self._settings[option.name] for option in registry.mode_of(self).options}

    def _identity(self) -> tuple[Any, ...]:
        return type(self), self._mode_text, self._source, *self._options().items()

    def __repr__(self) -> str:
        defaults = {option.name: option.default for option in registry.mode_of(self).options}
        changed = [f", {name}={value!r}" for name, value in self._options().items() if value != defaults[name]]
        return f'<{type(self).__name__} "{self.name}"{"".join(changed)}>'


def _own_mode(policy_class: type[QuantizedDTypePolicy], mode: Any) -> tuple[registry.Mode, dict[str, int]]:
    """Returns the mode that `mode` names, and its numbers; an error where it belongs to another class."""
    record, numbers = registry.parse_mode(mode)
    owners = {other.policy_class for other in registry.modes()}
    owner = next(base for base in policy_class.__mro__ if base in owners)  # a user's subclass has the modes of its base
    if record.policy_class is not owner:
        own = [str(other.grammar) for other in registry.modes() if other.policy_class is owner]
        raise PolicyError(
            f"Quantization mode belongs to {record.policy_class.__name__}, not to {policy_class.__name__}",
            got={"mode": mode},
            expected=f"one of {', '.join(own)}",
            fix=f"Use {record.policy_class.__name__}, or `get` with the full name",
        )
    return record, numbers


def _float_source(source: Any) -> DTypePolicy:
    """Returns the source as a policy that computes in floats, or `keep`."""
    if source is None:
        return global_source()
    if isinstance(source, DTypePolicy):
        policy = source
    else:
        policy = registry.get(source) if isinstance(source, str) else DTypePolicy(source)
    compute_dtype = policy.compute_dtype
    if (
        policy._is_map
        or registry.mode_of(policy).is_quantized
        or (compute_dtype is not None and not dtypes.get(compute_dtype).is_floating)
    ):
        raise PolicyError(
            "Source of a quantized policy does not compute in floats",
            got={"source_name": source},
            expected="a float policy such as 'mixed_bfloat16', or 'keep'",
        )
    return policy
