"""How far values are from what they should be: relative error, signal-to-noise ratio, cosine.

Sums are taken in float64 whatever the dtype of the values, so that the measure does not round more than what it
measures.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from narrowcast import arrays

__all__ = ["cosine", "largest_error", "relative_error", "sqnr_db"]


def relative_error(actual: Any, expected: Any) -> float:
    """Returns `norm(actual - expected) / norm(expected)`, the root of the relative mean square error.

    Args:
        actual: an array of NumPy, PyTorch or JAX.
        expected: an array of the same shape, of any of the three.

    Returns:
        0 where both are equal; infinity where only `expected` is zero; NaN where either holds NaN.

    Example:
        >>> relative_error(np.asarray([3.0, 4.5]), np.asarray([3.0, 4.0]))
        0.1
    """
    a, e = _pair(actual, expected)
    return _ratio(_norm(a - e), _norm(e))


def sqnr_db(actual: Any, expected: Any) -> float:
    """Returns the ratio of signal to quantization noise, in decibels.

    `20 log10(norm(expected) / norm(actual - expected))`. Each bit of a code is worth about 6 dB. Infinity where
    both are equal.

    Example:
        >>> sqnr_db(np.asarray([3.0, 4.5]), np.asarray([3.0, 4.0]))
        20.0
    """
    error = relative_error(actual, expected)
    return math.inf if error == 0 else -20 * math.log10(error)


def cosine(actual: Any, expected: Any) -> float:
    """Returns the cosine of the angle between two arrays, read as vectors; NaN where one is zero.

    Example:
        >>> cosine(np.asarray([1.0, 0.0]), np.asarray([2.0, 0.0]))
        1.0
    """
    a, e = _pair(actual, expected)
    norms = _norm(a) * _norm(e)
    return float(np.vdot(a, e)) / norms if norms else math.nan


def largest_error(actual: Any, expected: Any) -> float:
    """Returns the largest magnitude of a difference; 0 for empty arrays, NaN where either holds NaN.

    Example:
        >>> largest_error(np.asarray([1.0, 2.0]), np.asarray([1.5, 2.0]))
        0.5
    """
    a, e = _pair(actual, expected)
    return float(np.max(np.abs(a - e))) if a.size else 0.0


def _pair(actual: Any, expected: Any) -> tuple[Any, Any]:
    a, e = _as_float64(actual), _as_float64(expected)
    if a.shape != e.shape:
        raise ValueError(f"Arrays to compare differ in shape. Got actual={a.shape}, expected={e.shape}.")
    return a, e


def _as_float64(x: Any) -> Any:
    if arrays.framework(x) == "torch":
        x = x.detach().cpu().double().numpy()  # torch's bfloat16 has no NumPy form of its own
    return np.asarray(x).astype(np.float64)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(x.ravel()))


def _ratio(above: float, below: float) -> float:
    if below:
        return above / below
    return math.inf if above else above
