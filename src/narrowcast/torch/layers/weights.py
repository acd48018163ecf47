"""Variables that layers make for themselves with `add_weight`: what is known of each beside its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowcast.dtype_policies import dtypes
from narrowcast.errors import LayerError
from narrowcast.torch.layers import initializers, regularizers

__all__ = ["Weight", "make", "named", "note_own_dtypes", "refresh", "register"]


@dataclass(frozen=True)
class Weight:
    """What is known of a variable beside its values.

    Args:
        name: the label it was given, or `None`.
        initializer: what made its values.
        dtype: the dtype it was asked to have, by name; `None` for the layer's variable dtype.
        autocast: whether the layer's `call` sees it in the compute dtype.
        regularizer: its penalty, or `None`.
        trainable: whether it gets gradients while its layer is trainable.
        version: PyTorch's count of writes to it when it was made.
    """

    name: str | None
    initializer: Any
    dtype: str | None
    autocast: bool
    regularizer: Any
    trainable: bool
    version: int


def make(
    *,
    shape: Any,
    initializer: Any,
    dtype: Any,
    variable_dtype: str | None,
    trainable: bool,
    autocast: bool,
    regularizer: Any,
    name: str | None,
    empty: bool,
) -> tuple[nn.Parameter, Weight]:
    """Makes a variable.

    Args:
        shape: whole numbers; `None` or `()` for a scalar.
        initializer: a name, a config or a function; `None` for `glorot_uniform`, for dtypes that are no floats `zeros`.
        dtype: as `dtypes.standardize` takes it, or `None`.
        variable_dtype: the dtype where `dtype` is `None`.
        trainable: whether it gets gradients; only floats can.
        autocast: see `Weight`.
        regularizer: a name, a config, a function or `None`.
        name: see `Weight`.
        empty: whether to leave the values open, because they will be loaded.

    Raises:
        LayerError: a length of the shape is open, or the initializer returns another shape.
    """
    shape = () if shape is None else tuple(shape) if not isinstance(shape, int) else (shape,)
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise LayerError(
            f"Variable {name or ''!r} cannot be made: its shape is not known",
            got={"shape": shape},
            expected="whole numbers, 0 or above",
            fix="Make it in `build`, where the shape of the input is known",
        )
    own_dtype = None if dtype is None else dtypes.standardize(dtype)
    chosen = own_dtype or str(variable_dtype)
    is_floating = dtypes.get(chosen).is_floating
    filled = initializers.get(("glorot_uniform" if is_floating else "zeros") if initializer is None else initializer)
    values = torch.empty(shape, dtype=getattr(torch, chosen)) if empty else filled(shape, dtype=chosen)
    if tuple(values.shape) != shape:
        raise LayerError(
            f"Initializer of variable {name or ''!r} returns another shape than it was asked for",
            got={"shape": tuple(values.shape)},
            expected=str(shape),
        )
    parameter = nn.Parameter(values.detach(), requires_grad=trainable and is_floating)
    weight = Weight(
        name,
        filled,
        own_dtype,
        autocast,
        regularizers.get(regularizer),
        parameter.requires_grad,
        parameter._version,
    )
    return parameter, weight


def named(layer: Any) -> Iterator[tuple[str, nn.Parameter, Weight]]:
    """Yields the variables that `layer` made, by the names of the attributes they stand in."""
    for name, weight in layer._weights.items():
        owner = layer
        *children, last = name.split(".")
        for child in children:
            owner = owner._modules[child]
        parameter = owner._parameters.get(last)
        if parameter is not None:
            yield name, parameter, weight


def register(layer: Any) -> None:
    """Gives every variable that stands in no attribute yet one of its own: its label, or `variable`, numbered."""
    for parameter, weight in layer._pending_weights.copy():
        name = base = "".join(c if c.isalnum() else "_" for c in weight.name or "variable")
        number = 0
        while hasattr(layer, name):
            number += 1
            name = f"{base}_{number}"
        setattr(layer, name, parameter)


def note_own_dtypes(layer: Any) -> None:
    """Says where policies look for it which variables keep the dtype they were made with."""
    own: dict[int, tuple[Any, set[str]]] = {id(layer): (layer, set())}
    for name, weight in layer._weights.items():
        if weight.dtype is not None:
            *children, last = name.split(".")
            owner = layer
            for child in children:
                owner = owner._modules[child]
            own.setdefault(id(owner), (owner, set()))[1].add(last)
    for owner, names in own.values():
        owner.__dict__["_narrowcast_own_dtypes"] = frozenset(names)


def refresh(layer: Any, variable_dtype: str) -> None:
    """Makes the values again where a variable was made before its layer's policy was known, in a narrower dtype."""
    target = getattr(torch, variable_dtype)
    for _, parameter, weight in named(layer):
        untouched = parameter._version == weight.version
        if weight.dtype is None and parameter.dtype is not target and untouched and parameter.is_floating_point():
            with torch.device(parameter.device):
                values = weight.initializer(tuple(parameter.shape), dtype=variable_dtype)
            parameter.data = values
