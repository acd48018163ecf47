"""Rounding to integer codes: to nearest, ties to even, clipped before the cast."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from narrowcast import arrays

__all__ = ["round_to_codes"]


def round_to_codes(x: Any, largest: int, dtype: str = "int8") -> Any:
    """Returns `x` rounded to integers within `-largest..largest`.

    Args:
        x: values that are scaled already, float32, any shape.
        largest: the largest code. The range is symmetric: -128 is no code of int8.
        dtype: the integer dtype of the result.

    Numerics:
        To nearest, ties to even. Clipped before the cast, because frameworks wrap or saturate what does not fit. NaN
        becomes 0: it has no code, and the scale of its row says that it was there.

    Example:
        >>> round_to_codes(np.asarray([0.5, 1.5, -2.5, 300.0, float("nan")], np.float32), 127).tolist()
        [0, 2, -2, 127, 0]
    """
    xp = array_namespace(x)
    with np.errstate(invalid="ignore"):
        rounded = xp.clip(xp.round(x), -float(largest), float(largest))
        rounded = xp.where(xp.isnan(x), xp.zeros_like(x), rounded)
        return arrays.cast(rounded, dtype)
