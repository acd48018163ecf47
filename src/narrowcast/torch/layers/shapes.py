"""The shapes a layer is built with: read off the arguments of its first call, or given by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import LayerError

__all__ = ["axis_length", "first_tensor", "shapes_of_call", "standardize", "zeros_of"]


def standardize(shape: Any) -> Any:
    """Returns a shape, or a structure of shapes, with tuples for shapes.

    Args:
        shape: a tuple or list of whole numbers and `None` (any length), `torch.Size`, an object with a `shape`, a list
            or dict of shapes, or `None`.

    Raises:
        LayerError: it is no shape: the rank is unknown, or a length is negative or no whole number.

    Example:
        >>> standardize([None, 3]), standardize([[2, 3], [2, 4]])
        ((None, 3), [(2, 3), (2, 4)])
    """
    if shape is None:
        return None
    if isinstance(shape, Mapping):
        return {name: standardize(part) for name, part in shape.items()}
    shape = getattr(shape, "shape", shape)
    if isinstance(shape, list | tuple):
        if any(isinstance(part, list | tuple | Mapping) for part in shape):
            return [standardize(part) for part in shape]
        if all(length is None or _is_length(length) for length in shape):
            return tuple(None if length is None else int(length) for length in shape)
    raise LayerError(
        "Shape to build a layer with is not a shape",
        got={"shape": shape},
        expected="whole numbers, 0 or above, and None for an axis of any length",
        fix="Give the whole shape, batch axis first: `layer.build((None, 16))`",
    )


def _is_length(length: Any) -> bool:
    return isinstance(length, int | torch.SymInt) and not isinstance(length, bool) and length >= 0


def axis_length(layer: Any, shape: Any, axis: int) -> int:
    """Returns the length that an axis of the input must have to be known when a layer is built.

    Raises:
        LayerError: the shape has no such axis, or its length is open.
    """
    if not isinstance(shape, tuple) or not -len(shape) <= axis < len(shape):
        raise LayerError(
            f"{type(layer).__name__} at {layer.path!r} cannot be built: its input has no axis {axis}",
            got={"input_shape": shape},
            expected="the shape of one tensor with this axis",
            fix="Build it with the whole shape, `layer.build((None, 16))`, or call it on a batch",
        )
    length = shape[axis]
    if length is None:
        raise LayerError(
            f"{type(layer).__name__} at {layer.path!r} cannot be built: the length of axis {axis} of its input is open",
            got={"input_shape": shape},
            expected="a known length on this axis",
            fix="Build it with that length in the shape, or call it on a batch",
        )
    return int(length)


def shapes_of_call(
    build: Callable[..., Any], call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the shapes to call `build` with, by the names of its arguments.

    A `build` with one argument gets the shape of the first tensor of the call. One with several gets, for each argument
    `<name>_shape`, the shape of the call's argument `<name>`.

    Args:
        build: the bound method.
        call: the bound method.
        args: the arguments of the call, by position.
        kwargs: the same by name.

    Raises:
        LayerError: an argument of `build` belongs to no argument of `call`, or the call has no tensor for it.
    """
    given = inspect.signature(call).bind(*args, **kwargs).arguments
    shapes = {
        name: _shape_of(value)
        for name, value in given.items()
        if name not in ("mask", "args", "kwargs") and next(_tensors(value), None) is not None
    }
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [name for name, parameter in inspect.signature(build).parameters.items() if parameter.kind in kinds]
    if len(wanted) == 1:
        first = next(iter(shapes.values()), None)
        if first is None and args and isinstance(args[0], list | tuple):
            first = _shape_of(args[0])
        return {wanted[0]: first}
    names = list(inspect.signature(call).parameters)
    for name in wanted:
        if not name.endswith("_shape") or name.removesuffix("_shape") not in names:
            raise LayerError(
                f"Argument {name!r} of a layer's `build` belongs to no argument of its `call`",
                got={"build": wanted, "call": names},
                expected="one argument, or `<name>_shape` for arguments `<name>` of `call`",
            )
    found = {name: shapes[name.removesuffix("_shape")] for name in wanted if name.removesuffix("_shape") in shapes}
    needed = inspect.signature(build).parameters
    for name in wanted:
        if name not in found and needed[name].default is inspect.Parameter.empty:
            raise LayerError(
                f"First call of {type(getattr(call, '__self__', None)).__name__} has no tensor for "
                f"{name.removesuffix('_shape')!r}, so the layer cannot be built",
                expected="a tensor",
                fix="Build it first: `build(...)` with a shape for each",
            )
    return found


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the first tensor of a call, at any depth."""
    return next((tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return [_shape_of(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _shape_of(item) for name, item in value.items()}
    return None


def zeros_of(shape: Any) -> Any:
    """Returns zeros of a shape, or a structure of them; axes of any length have length 1.

    Example:
        >>> zeros_of((None, 3)).shape
        torch.Size([1, 3])
    """
    if isinstance(shape, tuple):
        return torch.zeros([1 if length is None else length for length in shape])
    if isinstance(shape, list):
        return [zeros_of(part) for part in shape]
    if isinstance(shape, Mapping):
        return {name: zeros_of(part) for name, part in shape.items()}
    return None
