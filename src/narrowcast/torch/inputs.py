"""Casting what flows into a module: floating tensors at any depth of its arguments, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast import arrays
from narrowcast.dtype_policies import dtypes

__all__ = ["cast_arguments", "cast_floats", "cast_mask"]

_LEAVES = frozenset({type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device})


def cast_floats(x: Any, dtype: torch.dtype) -> Any:
    """Returns `x` with every floating tensor in it cast to `dtype`.

    This is `narrowcast.arrays.cast_floating` on the way every call of a layer takes: tensors and plain containers of
    them are handled here, in a form that `torch.compile` follows; anything else is handed on to it.

    Args:
        x: a tensor; a tuple, list or dict, a subclass of one (named tuples, packed sequences, model outputs) or a
            dataclass, at any depth; or anything else, which is passed on.
        dtype: the dtype to cast to.

    Returns:
        `x` itself where nothing had to be cast, so that a forward that writes into a container it is given reaches the
        caller's own. Integers, bools and complex numbers are never touched.

    Numerics:
        To nearest, ties to even; what is too large becomes infinity.

    Example:
        >>> cast_floats((torch.ones(1), torch.arange(2)), torch.bfloat16)
        (tensor([1.], dtype=torch.bfloat16), tensor([0, 1]))
    """
    if isinstance(x, Tensor):
        return x.to(dtype) if x.dtype is not dtype and x.is_floating_point() else x
    cls = type(x)
    if cls in _LEAVES:
        return x
    if cls is tuple or cls is list:
        items = [cast_floats(item, dtype) for item in x]
        return x if _same(items, x) else (items if cls is list else tuple(items))
    if cls is dict:
        values = [cast_floats(value, dtype) for value in x.values()]
        return x if _same(values, x.values()) else dict(zip(x, values, strict=True))
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        items = [cast_floats(item, dtype) for item in x]
        return x if _same(items, x) else cls._make(items)
    return arrays.cast_floating(x, dtypes.standardize(dtype))


def _same(items: list[Any], others: Any) -> bool:
    # A loop and not `all`, because this runs for every argument of every call.
    for item, other in zip(items, others, strict=True):  # noqa: SIM110
        if item is not other:
            return False
    return True


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, masks: frozenset[int | str] = frozenset()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts the arguments of a call.

    Args:
        args: by position.
        kwargs: by name.
        dtype: the dtype to cast to.
        masks: the positions and names of additive masks, which `cast_mask` casts.

    Example:
        >>> cast_arguments((torch.ones(1), 2), {}, torch.float16)
        ((tensor([1.], dtype=torch.float16), 2), {})
    """
    if masks:
        args = tuple([cast_mask(x, dtype) if i in masks else cast_floats(x, dtype) for i, x in enumerate(args)])
        if kwargs:
            kwargs = {k: cast_mask(x, dtype) if k in masks else cast_floats(x, dtype) for k, x in kwargs.items()}
        return args, kwargs
    if kwargs:
        kwargs = {name: cast_floats(value, dtype) for name, value in kwargs.items()}
    return tuple([cast_floats(value, dtype) for value in args]), kwargs


def cast_mask(x: Any, dtype: torch.dtype) -> Any:
    """Casts an additive mask: what is finite stays finite.

    Masks hold the most negative number of the dtype they were made in (`torch.finfo(torch.float32).min`), which is
    minus infinity in a narrower one. A row that is masked as a whole would turn from an even mean into NaN.

    Args:
        x: a floating tensor, or anything else, which is cast by `cast_floats`.
        dtype: the dtype to cast to.

    Numerics:
        Finite values saturate; infinities and NaN stay.

    Example:
        >>> cast_mask(torch.tensor([0.0, -1e9, -torch.inf]), torch.float16).tolist()
        [0.0, -65504.0, -inf]
    """
    if not isinstance(x, Tensor) or x.dtype is dtype or not x.is_floating_point():
        return cast_floats(x, dtype)
    largest = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max > largest:
        x = x.clamp(-largest, largest).where(x.isfinite(), x)
    return x.to(dtype)
