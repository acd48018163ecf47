"""Penalties on weights and on outputs, as Keras names them.

A penalty has the dtype of the tensor it is computed from, which for weights is the variable dtype. Sums are carried out
in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from narrowcast.errors import LayerError, closest
from narrowcast.serialization import builtin, deserialize

__all__ = ["L1", "L1L2", "L2", "OrthogonalRegularizer", "Regularizer", "get"]


Class = TypeVar("Class", bound=type)

_CLASSES: dict[str, Any] = {}


def _named(*names: str) -> Callable[[Class], Class]:
    def register(cls: Class) -> Class:
        _CLASSES.update(dict.fromkeys((cls.__name__, *names), cls))
        return builtin(*names)(cls)

    return register


class Regularizer:
    """The base of penalties: called with a tensor, it returns a scalar of the tensor's dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the penalty of `x`."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return self._penalty(wide).to(x.dtype)

    def _penalty(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say what its penalty is")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal regularizer."""
        raise NotImplementedError(f"{type(self).__name__} has no `get_config`, so it cannot be saved")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes the regularizer whose `get_config` returned `config`."""
        return cls(**config)


def _factor(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise LayerError("Factor of a regularizer is not usable", got={name: value}, expected="a number, 0 or above")
    return float(value)


@_named("l1_l2")
class L1L2(Regularizer):
    """`l1 * sum(abs(x)) + l2 * sum(x ** 2)`.

    Args:
        l1: the factor of the absolute values, 0 or above.
        l2: the factor of the squares, 0 or above.

    Example:
        >>> L1L2(l1=1.0, l2=0.5)(torch.tensor([2.0, -2.0]))
        tensor(8.)
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self.l1, self.l2 = _factor("l1", l1 or 0.0), _factor("l2", l2 or 0.0)

    def _penalty(self, x: Tensor) -> Tensor:
        penalty = x.new_zeros(())
        if self.l1:
            penalty = penalty + self.l1 * x.abs().sum()
        if self.l2:
            penalty = penalty + self.l2 * x.square().sum()
        return penalty

    def get_config(self) -> dict[str, Any]:
        """See `Regularizer`."""
        return {"l1": self.l1, "l2": self.l2}


@_named("l1")
class L1(Regularizer):
    """`l1 * sum(abs(x))`.

    Args:
        l1: the factor, 0 or above.
    """

    def __init__(self, l1: float | None = 0.01) -> None:
        self.l1 = _factor("l1", 0.01 if l1 is None else l1)

    def _penalty(self, x: Tensor) -> Tensor:
        return self.l1 * x.abs().sum()

    def get_config(self) -> dict[str, Any]:
        """See `Regularizer`."""
        return {"l1": self.l1}


@_named("l2")
class L2(Regularizer):
    """`l2 * sum(x ** 2)`.

    Args:
        l2: the factor, 0 or above.
    """

    def __init__(self, l2: float | None = 0.01) -> None:
        self.l2 = _factor("l2", 0.01 if l2 is None else l2)

    def _penalty(self, x: Tensor) -> Tensor:
        return self.l2 * x.square().sum()

    def get_config(self) -> dict[str, Any]:
        """See `Regularizer`."""
        return {"l2": self.l2}


@_named("orthogonal_regularizer")
class OrthogonalRegularizer(Regularizer):
    """The mean of the absolute cosines between the rows, or the columns, of a matrix, each pair once.

    Args:
        factor: what the mean is multiplied by, 0 or above.
        mode: `rows` or `columns`.
    """

    def __init__(self, factor: float = 0.01, mode: str = "rows") -> None:
        self.factor = _factor("factor", factor)
        if mode not in ("rows", "columns"):
            raise LayerError("Mode of a regularizer is unknown", got={"mode": mode}, expected="'rows' or 'columns'")
        self.mode = mode

    def _penalty(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise LayerError("Orthogonality is of a matrix", got={"shape": tuple(x.shape)}, expected="two axes")
        rows = x if self.mode == "rows" else x.t()
        # The guard stands inside the root: a row of zeros has a finite gradient.
        rows = rows * rows.square().sum(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).rsqrt()
        size = rows.shape[0]
        cosines = (rows @ rows.t()) * (1 - torch.eye(size, dtype=x.dtype, device=x.device))
        return self.factor * cosines.abs().sum() / max(size * (size - 1), 1)

    def get_config(self) -> dict[str, Any]:
        """See `Regularizer`."""
        return {"factor": self.factor, "mode": self.mode}


def get(identifier: Any) -> Any:
    """Returns the regularizer that `identifier` names.

    Args:
        identifier: a name (`"l2"`, factor 0.01), a config as `narrowcast.saving.serialize` writes it, a regularizer,
            any function of a tensor, or `None`, which is returned.

    Raises:
        LayerError: there is no such regularizer.

    Example:
        >>> get("l2").get_config()
        {'l2': 0.01}
    """
    if identifier is None or isinstance(identifier, Regularizer):
        return identifier
    if isinstance(identifier, dict):
        return get(deserialize(identifier))
    if isinstance(identifier, str) and identifier in _CLASSES:
        cls = _CLASSES[identifier]
        # By name it has both factors, made by hand neither.
        return L1L2(0.01, 0.01) if cls is L1L2 else cls()
    if callable(identifier):
        return identifier() if isinstance(identifier, type) else identifier
    near = closest(str(identifier), _CLASSES)
    raise LayerError(
        "Regularizer is unknown",
        got={"regularizer": identifier},
        expected="the name of a regularizer, or a function of a tensor",
        suggestion=near[0] if near else None,
    )
