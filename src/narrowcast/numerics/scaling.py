"""Scales: the factors between values and codes.

Two factors of opposite meaning are in use under one name elsewhere. Here `scale` is always what values are multiplied
by before they are rounded, and `scale_inv` what codes are multiplied by afterwards. Both are float32 whatever the dtype
of the values, and tensors are only ever *multiplied* by them: frameworks differ in how they divide by a scalar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from narrowcast import arrays

__all__ = ["SMALLEST_AMAX", "amax", "symmetric_scale"]

SMALLEST_AMAX = 2.0**-100
"""An amax below this counts as this, so that `scale` is finite and `scale_inv` is no subnormal, which XLA flushes."""


def amax(x: Any, axis: int | tuple[int, ...]) -> Any:
    """Returns the largest magnitude along `axis`, as float32, with that axis kept at length 1.

    Args:
        x: an array of floats of NumPy, PyTorch or JAX.
        axis: the axes that share one scale. Of length 0 they give 0.

    Numerics:
        Exact for float32 and narrower; float64 is rounded to float32 first. NaN anywhere gives NaN, infinity infinity.

    Example:
        >>> amax(np.asarray([[1.0, -3.0], [0.5, 0.25]]), axis=1).tolist()
        [[3.0], [0.5]]
    """
    xp = array_namespace(x)
    axes = tuple(a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes infinity, which the scale tells
        x = arrays.cast(x, "float32")
    if any(x.shape[a] == 0 for a in axes):
        return xp.sum(x, axis=axes, keepdims=True)  # the zeros of an empty sum
    return xp.max(xp.abs(x), axis=axes, keepdims=True)


def symmetric_scale(amax: Any, largest: float) -> tuple[Any, Any]:
    """Returns `scale = largest / amax` and `scale_inv = 1 / scale`.

    Args:
        amax: magnitudes as `amax` returns them, float32.
        largest: the largest code.

    Returns:
        Two arrays of the shape of `amax`, float32. `x * scale` lies within `-largest..largest` but for rounding.

    Numerics:
        True divisions of array by array, so that every framework gives the same bits (under `jax.jit`, XLA rewrites the
        second one: `scale_inv` may be off by a unit in the last place, codes are not). Where `amax` is 0 both are finite
        (see `SMALLEST_AMAX`). An amax of NaN gives NaN twice, one of infinity 0 and infinity: a row that holds either
        comes back as NaN or infinity, and not as a silent zero.

    Example:
        >>> scale, scale_inv = symmetric_scale(np.asarray([254.0, 0.0], np.float32), 127.0)
        >>> scale.tolist()[0], scale_inv.tolist()[0], bool(np.isfinite(scale[1]))
        (0.5, 2.0, True)
    """
    xp = array_namespace(amax)
    with np.errstate(all="ignore"):  # an infinite amax divides by zero on purpose
        amax = xp.where(amax < SMALLEST_AMAX, xp.full_like(amax, SMALLEST_AMAX), amax)
        scale = xp.full_like(amax, largest) / amax
        return scale, xp.full_like(amax, 1.0) / scale
