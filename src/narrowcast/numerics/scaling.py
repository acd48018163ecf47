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
from narrowcast.dtype_policies import dtypes

__all__ = [
    "LARGEST_FLOAT32",
    "SMALLEST_AMAX",
    "amax",
    "block_amax",
    "expand_blocks",
    "saturating_scale",
    "symmetric_scale",
]

LARGEST_FLOAT32 = dtypes.get("float32").largest

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
        second one: `scale_inv` may be off by a unit in the last place, codes are not). Where `amax` is 0 both are
        finite (see `SMALLEST_AMAX`). An amax of NaN gives NaN twice, one of infinity 0 and infinity: a row that holds
        either comes back as NaN or infinity, and not as a silent zero.

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


def saturating_scale(amax: Any, largest: float, *, margin: int = 0) -> tuple[Any, Any]:
    """Returns `scale = largest / 2**margin / amax` and `scale_inv = 1 / scale` for formats that saturate (float8).

    Args:
        amax: largest magnitudes, float32, any shape.
        largest: the largest value of the format.
        margin: powers of two to stay below it.

    Returns:
        Two arrays of the shape of `amax`, float32. `scale` is always finite and above 0.

    Numerics:
        True divisions of array by array. An amax of 0 gives 1; one so small that the quotient is infinite gives the
        largest float32, so that zeros stay zeros. An amax of NaN or infinity gives a scale of 1 and a `scale_inv` of
        NaN: clipping hides an infinity, and what is multiplied by this `scale_inv` shows that it was there.

    Example:
        >>> scale, scale_inv = saturating_scale(np.asarray([1.0, 0.0, np.inf], np.float32), 448.0)
        >>> scale.tolist(), np.isnan(scale_inv).tolist()
        ([448.0, 1.0, 1.0], [False, False, True])
    """
    xp = array_namespace(amax)
    one = xp.full_like(amax, 1.0)
    with np.errstate(all="ignore"):  # amax is 0, subnormal or not finite on purpose
        scale = xp.full_like(amax, largest * 2.0**-margin) / amax
        scale = xp.where(xp.isfinite(scale), scale, xp.full_like(amax, LARGEST_FLOAT32))
        is_finite = xp.isfinite(amax)
        scale = xp.where(is_finite & (amax > 0), scale, one)
        return scale, xp.where(is_finite, one / scale, xp.full_like(amax, float("nan")))


def block_amax(x: Any, block: tuple[int, int]) -> Any:
    """Returns the largest magnitude of each block of a matrix; blocks at the edges may be smaller.

    Args:
        x: an array of floats, shape `(rows, columns)`.
        block: rows and columns of a block.

    Returns:
        float32, shape `(ceil(rows / block[0]), ceil(columns / block[1]))`.

    Example:
        >>> block_amax(np.asarray([[1.0, -2.0, 3.0]]), (1, 2)).tolist()
        [[2.0, 3.0]]
    """
    xp = array_namespace(x)
    x = xp.abs(arrays.cast(x, "float32"))
    rows, columns = (-(-length // size) for length, size in zip(x.shape, block, strict=True))
    below, right = rows * block[0] - x.shape[0], columns * block[1] - x.shape[1]
    if right:
        x = xp.concat([x, xp.zeros_like(x[:, :1]) + xp.zeros((1, right), dtype=x.dtype)], axis=1)
    if below:
        x = xp.concat([x, xp.zeros_like(x[:1, :]) + xp.zeros((below, 1), dtype=x.dtype)], axis=0)
    return xp.max(xp.reshape(x, (rows, block[0], columns, block[1])), axis=(1, 3))


def expand_blocks(per_block: Any, block: tuple[int, int], shape: tuple[int, int]) -> Any:
    """Returns the value of each block at every element of it.

    Args:
        per_block: one value a block, as `block_amax` lays them out.
        block: rows and columns of a block.
        shape: the shape of the matrix.

    Example:
        >>> expand_blocks(np.asarray([[2.0, 3.0]]), (1, 2), (1, 3)).tolist()
        [[2.0, 2.0, 3.0]]
    """
    xp = array_namespace(per_block)
    for axis in (0, 1):
        per_block = xp.repeat(per_block, block[axis], axis=axis)
    return per_block[: shape[0], : shape[1]]
