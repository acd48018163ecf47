"""Activation functions by name, as Keras names them. Each takes a tensor and returns one of its shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.errors import LayerError, closest
from narrowcast.serialization import builtin, deserialize, serialize

__all__ = ["get", "name_of"]

Activation = Callable[..., Tensor]

_FUNCTIONS: dict[str, Activation] = {}


def _named(*names: str) -> Callable[[Activation], Activation]:
    def register(function: Activation) -> Activation:
        for name in (function.__name__, *names):
            _FUNCTIONS[name] = function
        return builtin(*names)(function)

    return register


@_named()
def linear(x: Tensor) -> Tensor:
    """Returns `x`."""
    return x


@_named()
def relu(x: Tensor, negative_slope: float = 0.0, max_value: float | None = None, threshold: float = 0.0) -> Tensor:
    """Returns `x` above the threshold, at most `max_value`; below it `negative_slope * (x - threshold)`."""
    if negative_slope == 0 and max_value is None and threshold == 0:
        return torch.relu(x)
    above = x if max_value is None else x.clamp(max=max_value)
    return torch.where(x >= threshold, above, negative_slope * (x - threshold))


@_named()
def leaky_relu(x: Tensor, negative_slope: float = 0.2) -> Tensor:
    """Returns `x` above zero, else `negative_slope * x`."""
    return F.leaky_relu(x, negative_slope)


@_named()
def relu6(x: Tensor) -> Tensor:
    """Returns `x` within 0 and 6."""
    return F.relu6(x)


@_named()
def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """Returns `x` times the normal distribution's probability of less, or its approximation by tanh."""
    return F.gelu(x, approximate="tanh" if approximate else "none")


@_named("swish")
def silu(x: Tensor) -> Tensor:
    """Returns `x * sigmoid(x)`."""
    return F.silu(x)


@_named()
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Returns `x` above zero, else `alpha * (exp(x) - 1)`."""
    return F.elu(x, alpha)


@_named()
def selu(x: Tensor) -> Tensor:
    """Returns the scaled exponential linear unit."""
    return F.selu(x)


@_named()
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Returns the continuously differentiable exponential linear unit."""
    return F.celu(x, alpha)


@_named()
def softplus(x: Tensor) -> Tensor:
    """Returns `log(1 + exp(x))`."""
    return F.softplus(x)


@_named()
def softsign(x: Tensor) -> Tensor:
    """Returns `x / (1 + abs(x))`."""
    return F.softsign(x)


@_named()
def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent."""
    return torch.tanh(x)


@_named()
def sigmoid(x: Tensor) -> Tensor:
    """Returns `1 / (1 + exp(-x))`."""
    return torch.sigmoid(x)


@_named()
def hard_sigmoid(x: Tensor) -> Tensor:
    """Returns `x / 6 + 1/2` within 0 and 1."""
    return F.hardsigmoid(x)


@_named("hard_swish")
def hard_silu(x: Tensor) -> Tensor:
    """Returns `x * hard_sigmoid(x)`."""
    return F.hardswish(x)


@_named()
def hard_tanh(x: Tensor) -> Tensor:
    """Returns `x` within -1 and 1."""
    return F.hardtanh(x)


@_named()
def exponential(x: Tensor) -> Tensor:
    """Returns `exp(x)`."""
    return torch.exp(x)


@_named()
def mish(x: Tensor) -> Tensor:
    """Returns `x * tanh(softplus(x))`."""
    return F.mish(x)


@_named()
def log_sigmoid(x: Tensor) -> Tensor:
    """Returns `log(sigmoid(x))`."""
    return F.logsigmoid(x)


@_named()
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Returns `exp(x)` divided by its sum along an axis; the sum is carried out in float32 at least."""
    return F.softmax(x, dim=axis)


@_named()
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Returns the logarithm of the softmax along an axis."""
    return F.log_softmax(x, dim=axis)


def get(identifier: Any) -> Activation | None:
    """Returns the activation function that `identifier` names; `None` for none at all and for `"linear"`.

    Args:
        identifier: a name, a config as `narrowcast.saving.serialize` writes it, any function of a tensor (a module
            too), or `None`.

    Raises:
        LayerError: there is no such function, or it is a class.

    Example:
        >>> get("relu")(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    if isinstance(identifier, dict):
        identifier = deserialize(identifier)
    if isinstance(identifier, str):
        found = _FUNCTIONS.get(identifier)
        if found is None:
            near = closest(identifier, _FUNCTIONS)
            raise LayerError(
                "Activation is unknown",
                got={"activation": identifier},
                expected="the name of an activation function, or a function of a tensor",
                suggestion=near[0] if near else None,
            )
        identifier = found
    if identifier is None or identifier is linear:
        return None
    if not callable(identifier) or isinstance(identifier, type):
        raise LayerError(
            "Activation is not a function",
            got={"activation": identifier},
            expected="a function of a tensor, or a module",
        )
    function: Activation = identifier
    return function


def name_of(function: Activation | None) -> Any:
    """Returns what a config says of an activation function: its name, or the config of one that is registered.

    Example:
        >>> name_of(get("swish")), name_of(None)
        ('silu', 'linear')
    """
    if function is None:
        return "linear"
    name = getattr(function, "__name__", "")
    return name if _FUNCTIONS.get(name) is function else serialize(function)
