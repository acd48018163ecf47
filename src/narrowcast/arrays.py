"""Arrays of any framework: whose they are, whether they hold floats, and casting them.

No framework is imported for that: the framework of an array is loaded already, so it is found in `sys.modules`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

from narrowcast.errors import UnsupportedError

__all__ = ["cast", "cast_floating", "dtype_name", "framework", "is_floating"]

_CLASSES = {
    "torch": ("Tensor",),
    "numpy": ("ndarray", "generic"),
    "jax": ("Array", "ShapeDtypeStruct"),
    "keras": ("KerasTensor",),
}
"""The classes of arrays, symbolic ones included, by the module they are attributes of."""


def framework(x: Any) -> str | None:
    """Returns whose array `x` is: `torch`, `numpy`, `jax` or `keras` (a symbolic tensor); `None` if it is no array.

    Example:
        >>> import numpy
        >>> framework(numpy.zeros(3)), framework([0.0])
        ('numpy', None)
    """
    for name, classes in _CLASSES.items():
        module = sys.modules.get(name)
        # A module that another thread is still importing may not have the class yet; then `x` is not of it.
        if module is not None and any(isinstance(x, getattr(module, cls, ())) for cls in classes):
            return name
    return None


def dtype_name(x: Any) -> str:
    """Returns the name of the dtype of the array `x`, as its framework spells it.

    Example:
        >>> import numpy
        >>> dtype_name(numpy.zeros(3))
        'float64'
    """
    return str(getattr(x.dtype, "name", x.dtype)).rpartition(".")[2]


def is_floating(x: Any) -> bool:
    """Says whether `x` is an array of floats: bfloat16 and float8 too, but neither complex numbers nor Python's floats.

    Example:
        >>> import numpy
        >>> is_floating(numpy.zeros(3)), is_floating(numpy.zeros(3, complex)), is_floating(0.0)
        (True, False, False)
    """
    if framework(x) is None:
        return False
    name = dtype_name(x)
    return name.startswith(("float", "bfloat")) and not name.endswith("_x2")  # torch's packed pairs of float4 codes


def cast(x: Any, dtype: str) -> Any:
    """Returns the array `x` in another dtype, as an array of the same framework.

    Args:
        x: an array for which `framework` has a name.
        dtype: the dtype's name, as in ml_dtypes.

    Raises:
        UnsupportedError: the framework has no such dtype.

    Numerics:
        The framework's own cast: to nearest, ties to even; what is too large becomes infinity, or NaN where the dtype
        has no infinity.
    """
    name = framework(x)
    if name is None:
        raise TypeError(f"Only arrays can be cast. Got an object of type {type(x).__name__}.")
    return _CASTS[name](sys.modules[name], x, dtype)


def _named(name: str, dtype: str, module: Any) -> Any:
    """Returns the dtype object that `module` has under this name."""
    found = getattr(module, dtype, None)
    if found is not None:
        return found
    raise UnsupportedError(f"Arrays of {name} cannot have this dtype", got={"dtype": dtype})


def _cast_torch(torch: Any, x: Any, dtype: str) -> Any:
    return x.to(_named("torch", dtype, torch))


def _cast_numpy(numpy: Any, x: Any, dtype: str) -> Any:
    # NumPy learns bfloat16, float8 and smaller floats from ml_dtypes, so that alone is imported where it is needed.
    module = numpy if hasattr(numpy, dtype) else importlib.import_module("ml_dtypes")
    return x.astype(_named("numpy", dtype, module))


def _cast_jax(jax: Any, x: Any, dtype: str) -> Any:
    target = _named("jax", dtype, jax.numpy)
    return x.update(dtype=target) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(target)


def _cast_keras(keras: Any, x: Any, dtype: str) -> Any:
    return keras.ops.cast(x, dtype)


_CASTS: dict[str, Callable[[Any, Any, str], Any]] = {
    "torch": _cast_torch,
    "numpy": _cast_numpy,
    "jax": _cast_jax,
    "keras": _cast_keras,
}


def cast_floating(x: Any, dtype: str) -> Any:
    """Casts every array of floats in `x` to `dtype`; everything else stays as it is.

    Args:
        x: an array, or lists, tuples, dicts, dataclasses and their subclasses that hold arrays, at any depth. Objects
            of other types are passed on and not looked into.
        dtype: the dtype's name, as in ml_dtypes.

    Returns:
        `x` itself where nothing had to be cast, so that a function that writes into the container it was given still
        does. Otherwise a copy of the same type; parts in which nothing had to be cast are the same objects.

    Example:
        >>> import numpy
        >>> cast_floating({"ids": numpy.arange(2), "scale": numpy.ones(1)}, "float16")
        {'ids': array([0, 1]), 'scale': array([1.], dtype=float16)}
    """
    if is_floating(x):
        return x if dtype_name(x) == dtype else cast(x, dtype)
    if isinstance(x, dict):
        changed = _changed(x.items(), dtype)
        return _copy_with(x, changed, lambda new, key, value: new.__setitem__(key, value)) if changed else x
    if isinstance(x, list):
        changed = _changed(enumerate(x), dtype)
        return _copy_with(x, changed, lambda new, key, value: new.__setitem__(key, value)) if changed else x
    if isinstance(x, tuple):
        changed = _changed(enumerate(x), dtype)
        return _copy_tuple(x, changed) if changed else x
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = ((field.name, getattr(x, field.name)) for field in dataclasses.fields(x) if hasattr(x, field.name))
        changed = _changed(fields, dtype)
        return _copy_with(x, changed, object.__setattr__) if changed else x  # frozen ones too
    return x


def _changed(items: Any, dtype: str) -> dict[Any, Any]:
    """Returns the items that casting replaces, by key."""
    cast_items = ((key, value, cast_floating(value, dtype)) for key, value in items)
    return {key: new for key, old, new in cast_items if new is not old}


def _copy_with(x: Any, changed: dict[Any, Any], assign: Callable[[Any, Any, Any], None]) -> Any:
    new = copy.copy(x)
    for key, value in changed.items():
        assign(new, key, value)
    return new


def _copy_tuple(x: Any, changed: dict[int, Any]) -> Any:
    values = [changed.get(index, value) for index, value in enumerate(x)]
    return x._make(values) if hasattr(x, "_make") else type(x)(values)
