"""The config of a layer: the arguments that make an equal one, with the policies of all layers below it."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from narrowcast import dtype_policies
from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap
from narrowcast.errors import ConfigError, LayerError, NarrowcastError, UnsupportedError
from narrowcast.serialization import serialize
from narrowcast.torch.layers import paths, regularizers
from narrowcast.torch.layers.carrying import carriable
from narrowcast.torch.layers.policies import look_up, without_mode
from narrowcast.torch.scheme import original_class

__all__ = ["class_of", "config_of", "framed", "make", "number", "positive", "refuse", "snake_case"]

_BASE = ("activity_regularizer", "trainable", "dtype", "autocast", "name")
"""The arguments of `Layer` itself."""


def snake_case(name: str) -> str:
    """Returns the name of a class as a label.

    Example:
        >>> snake_case("MultiHeadAttention"), snake_case("RMSNormalization")
        ('multi_head_attention', 'rms_normalization')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def class_of(layer: Any) -> type:
    """Returns the class of a layer as its author wrote it, whatever policy it carries."""
    return original_class(layer)


def refuse(name: str, value: Any) -> None:
    """Raises for an argument that Keras has and PyTorch's optimizers have no place for, unless it is not given."""
    if value:
        raise UnsupportedError(
            f"Argument {name} is not supported on PyTorch",
            got={name: value},
            expected="None",
            fix=_INSTEAD.get(name, "Leave it out"),
        )


_INSTEAD = {
    "constraint": "Leave it out; `torch.nn.utils.parametrize` keeps a weight within bounds",
    "lora_rank": "Leave it out; adapters are added to the layer's `core`, a module of PyTorch, by libraries for them",
    "quantization_config": "Leave it out; the settings of a mode are those of its policy",
}


def positive(name: str, value: Any, *, optional: bool = False) -> Any:
    """Returns `value` if it is a whole number of at least 1.

    Raises:
        LayerError: it is not.
    """
    if optional and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise LayerError(
            f"Argument {name} of a layer is not usable", got={name: value}, expected="a whole number of at least 1"
        )
    return value


def number(name: str, value: Any, *, most: float = math.inf) -> float:
    """Returns `value` if it is a number from 0 to `most`.

    Raises:
        LayerError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        expected = "a number, 0 or above" if most == math.inf else f"a number from 0 to {most:g}"
        raise LayerError(f"Argument {name} of a layer is not usable", got={name: value}, expected=expected)
    return float(value)


def framed(get_config: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Returns a class's `get_config` with paths relative to the layer while it runs.

    A map that it returns as `dtype` and that has no default gets the layer's own policy as its default: what the map
    leaves open is what the layer has, whatever the global policy is where it is loaded.
    """

    @functools.wraps(get_config)
    def in_frame(self: Any) -> dict[str, Any]:
        with paths.frame(self):
            config = get_config(self)
            given = config.get("dtype")
            if isinstance(given, DTypePolicyMap) and not given.has_default:
                own = without_mode(_policy_of(self))
                config = {**config, "dtype": DTypePolicyMap(own, dict(given.items()), optional=given.optional)}
        return config

    return in_frame


def _policy_of(layer: Any) -> DTypePolicy:
    policy: DTypePolicy = layer._carried_policy() or layer._resolved_policy()
    return policy


def config_of(layer: Any) -> dict[str, Any]:
    """Returns what `Layer.get_config` returns; paths must be relative to `layer`."""
    config: dict[str, Any] = {"name": layer.name, "trainable": layer.trainable, "dtype": serialize(_dtype_of(layer))}
    if not layer._given_autocast:
        config["autocast"] = False
    if layer.activity_regularizer is not None:
        config["activity_regularizer"] = serialize(layer.activity_regularizer)
    arguments = layer.__dict__.get("_arguments")
    return {**_own_arguments(class_of(layer), arguments), **config} if arguments is not None else config


def _own_arguments(cls: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """The arguments that the layer was made with, by name, without those of every layer."""
    signature = inspect.signature(cls.__init__)
    bound = signature.bind(None, *arguments[0], **arguments[1])
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"Arguments of {cls.__name__} have no names, so its config cannot be made by itself",
                got={"arguments": signature},
                fix="Give the class a `get_config` and a `from_config`",
            )
        found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return {name: value for name, value in found.items() if name not in _BASE}


def _dtype_of(layer: Any) -> DTypePolicy:
    """The policies of a layer and of all below it: one policy, or a map relative to the layer."""
    own, given = _policy_of(layer), layer._given_policy
    if not layer._is_settled:
        return own if given is None else given
    below = {inner.path: _policy_of(inner) for inner in layer._flatten_layers(include_self=False)}
    if isinstance(given, DTypePolicyMap) and not _is_handed_down(layer, given):
        modules = {inner.path: inner for inner in layer._flatten_layers(include_self=False)}
        if all(carriable(modules[path], look_up(given, path)) == policy for path, policy in below.items()):
            return given  # still true: the author's own words
    other = {path: policy for path, policy in below.items() if policy != own}
    return DTypePolicyMap(own, other) if other else own


def _is_handed_down(layer: Any, given: DTypePolicyMap) -> bool:
    return any(above.__dict__.get("_given_policy") is given for above, _ in paths.ancestors(layer))


def make(cls: Any, config: Mapping[str, Any]) -> Any:
    """Returns the layer of class `cls` that `config` describes; arguments of `Layer` that `cls` does not take are set.

    Raises:
        ConfigError: the config has an argument that the class does not take, or lacks one.
    """
    arguments = dict(config)
    if isinstance(arguments.get("dtype"), Mapping) and not isinstance(arguments["dtype"], DTypePolicy):
        arguments["dtype"] = dtype_policies.deserialize(arguments["dtype"])
    parameters = _parameters(cls)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    later = (
        {name: arguments.pop(name) for name in _BASE if name in arguments and name not in parameters}
        if not takes_any
        else {}
    )
    try:
        layer = cls(**arguments)
    except TypeError as error:
        if isinstance(error, NarrowcastError) or "argument" not in str(error):
            raise
        raise ConfigError(
            f"Config does not fit {cls.__name__}: {error}",
            got={"config": dict(config)},
            expected=f"the arguments {', '.join(name for name in parameters if name != 'self')}",
        ) from error
    if later:
        _set_later(layer, later)
    return layer


@functools.lru_cache(maxsize=1024)
def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.__init__).parameters


def _set_later(layer: Any, arguments: Mapping[str, Any]) -> None:
    if arguments.get("dtype") is not None:
        layer._given_policy = dtype_policies.get(arguments["dtype"])
    if "name" in arguments:
        layer._given_name = arguments["name"]
    if "autocast" in arguments:
        layer.autocast = layer._given_autocast = arguments["autocast"]
    if "activity_regularizer" in arguments:
        layer.activity_regularizer = regularizers.get(arguments["activity_regularizer"])
    if not arguments.get("trainable", True):
        layer.trainable = False
