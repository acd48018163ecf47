"""Taking weights from elsewhere: arrays in Keras' layout, by path and name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import TreeMismatchError, closest
from narrowcast.torch.layers.base import Layer

__all__ = ["load"]

Weights = Mapping[str, Mapping[str, Any]]
Rename = Mapping[str, str] | Callable[[str], str] | None


def load(model: Layer, weights: Weights, rename: Rename = None) -> None:
    """Sets the variables of a built model of layers: all of them or, on an error, none.

    Args:
        model: the model.
        weights: by the path of a layer and the name of a variable, an array of floats in Keras' layout. Variables of
            classes of users' own may be named by their numbers.
        rename: other paths in the model: a table from the beginnings of paths there to those here, of which the
            longest counts, or a function from a path there to one here.

    Raises:
        TreeMismatchError: a layer or variable is on one side only, or has another shape; lists all.
    """
    layers = {layer.path or "": layer for layer in model._flatten_layers()}
    wanted = _wanted(layers)
    given = {_renamed(path, rename): dict(variables) for path, variables in weights.items()}
    _move_below(given, layers)
    differences: list[str] = []
    chosen: list[tuple[Layer, str, Any, Tensor]] = []
    for path in dict.fromkeys([*wanted, *given]):
        if path not in wanted or path not in given:
            differences.append(_one_sided(path, wanted, given))
            continue
        pairs = _paired(wanted[path], given[path])
        if pairs is None:
            differences.append(
                f"layer {path!r} has the variables {', '.join(wanted[path])} here, {', '.join(given[path])} there"
            )
            continue
        for name, array in pairs.items():
            present = wanted[path][name]
            if math.prod(array.shape) != present.numel() or (array.ndim != 2 and array.shape != tuple(present.shape)):
                differences.append(
                    f"variable {name!r} of {path!r} is {tuple(present.shape)} here, {tuple(array.shape)} there"
                )
            # Two axes in place of more are those of a kernel whose codes were packed.
            chosen.append((layers[path], name, array, present))
    if differences:
        raise TreeMismatchError(
            f"Weights are not those of {type(model).__name__}",
            differences=differences,
            fix="Build the model first; where only paths differ, give `rename`",
        )
    for layer, name, array, present in chosen:
        value = torch.tensor(array).reshape(present.shape)
        if name in layer.variable_names:
            setattr(layer, name, value)
        else:
            with torch.no_grad():
                present.copy_(value)


def _wanted(layers: Mapping[str, Layer]) -> dict[str, dict[str, Any]]:
    """The variables to be set, by path and name; one that two layers list, once."""
    seen: set[int] = set()
    wanted: dict[str, dict[str, Any]] = {}
    for path, layer in layers.items():
        for name, value in layer._own_variables():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                wanted.setdefault(path, {})[name] = value
    return wanted


def _move_below(given: dict[str, dict[str, Any]], layers: Mapping[str, Layer]) -> None:
    for path, layer in layers.items():
        for name, (child, there) in layer._variables_below.items():
            below = f"{path}/{child}" if path else child
            if below in layers and name in given.get(path, {}):
                given.setdefault(below, {})[there] = given[path].pop(name)


def _renamed(path: str, rename: Rename) -> str:
    if rename is None:
        return path
    if callable(rename):
        return rename(path)
    fitting = [old for old in rename if path == old or path.startswith(f"{old}/") or old == ""]
    if not fitting:
        return path
    old = max(fitting, key=len)
    rest = path[len(old) :].lstrip("/")
    return "/".join(filter(None, [rename[old], rest]))


def _one_sided(path: str, wanted: Weights, given: Weights) -> str:
    if path in wanted:
        near = closest(path, given)
        text = f"layer {path!r} is in the model and not among the weights"
    else:
        near = closest(path, wanted)
        text = f"layer {path!r} is among the weights and not in the model"
    return f"{text} (there is {near[0]!r})" if near else text


def _paired(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arrays by the names here: by their names there, or in order where these are others or numbers."""
    if set(wanted) == set(given):
        return dict(given)
    if len(wanted) != len(given):
        return None
    return dict(zip(wanted, given.values(), strict=True))
