"""Delayed scaling: a tensor is scaled by the largest magnitude that it had in former steps.

One state for each tensor that is quantized (a *role*: an input, a weight, a gradient), all roles along the first axis:

    scale    (roles,)          what values are multiplied by; 0 where no step has been recorded yet
    history  (roles, length)   the amax of the last steps, a ring: 0 where there was none
    index    (roles,)          where the next amax goes
    pending  (roles,)          the largest amax seen since the last advance

Within a step amax merges into `pending` by *max*, which is idempotent: a layer used twice, accumulated micro-batches
and a recomputed forward need no rule of their own. `advance` moves the state on, once an optimizer step. A role whose
pending amax is 0 was not used and does not move. Amaxes that are not finite never get in and cannot freeze a scale.

References:
    Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3: scaling factors from a history.
    NVIDIA, Transformer Engine, delayed scaling: the rule for a new scale is the one of its fused kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from narrowcast.numerics.scaling import LARGEST_FLOAT32, saturating_scale

__all__ = ["advance", "in_order", "merge", "resize", "scale_in_use"]


def merge(pending: Any, amax: Any) -> Any:
    """Returns the pending amax after a use: the larger one; an amax that is not finite leaves it as it was.

    Example:
        >>> merge(np.asarray([1.0, 1.0, 1.0]), np.asarray([2.0, 0.5, np.inf])).tolist()
        [2.0, 1.0, 1.0]
    """
    xp = array_namespace(pending)
    return xp.maximum(pending, xp.where(xp.isfinite(amax), amax, xp.zeros_like(amax)))


def scale_in_use(scale: Any, amax: Any, largest: float, *, margin: int = 0) -> Any:
    """Returns the scale to quantize with: the state's, or that of the present tensor where there is no state yet.

    Args:
        scale: of the state, float32; 0 where no step has been recorded.
        amax: of the tensor, float32, the shape of `scale`.
        largest: the largest value of the format.
        margin: powers of two to stay below it.

    Example:
        >>> scale_in_use(np.asarray([0.0, 2.0]), np.asarray([4.0, 4.0]), 448.0).tolist()
        [112.0, 2.0]
    """
    xp = array_namespace(scale)
    return xp.where(scale > 0, scale, saturating_scale(amax, largest, margin=margin)[0])


def advance(
    scale: Any, history: Any, index: Any, pending: Any, largest: Any, *, margin: int = 0, use_max: bool = True
) -> tuple[Any, Any, Any]:
    """Returns scale, history and index after a step; `pending` is then to be cleared.

    `history[index] = pending`, `scale = largest / 2**margin / a`, where `a` is the largest entry or the newest one.

    Args:
        scale: float32, shape `(roles,)`.
        history: float32, shape `(roles, length)`.
        index: an integer dtype (int64 for PyTorch), shape `(roles,)`, within `0..length - 1`.
        pending: float32, shape `(roles,)`.
        largest: the largest value of each role's format, float32, shape `(roles,)` or a number.
        margin: powers of two to stay below it.
        use_max: whether `a` is the largest entry of the history, or the newest.

    Numerics:
        float32, one true division. A scale that would be infinite is the largest float32. Roles whose pending amax is 0
        (or not finite, which `merge` never leaves) keep everything.

    Example:
        >>> state = np.asarray([0.0]), np.zeros((1, 2)), np.asarray([0])
        >>> for amax in (4.0, 1.0, 2.0):
        ...     state = advance(*state, np.asarray([amax]), 448.0)
        ...     print(state[0].tolist(), in_order(*state[1:]).tolist())
        [112.0] [[0.0, 4.0]]
        [112.0] [[4.0, 1.0]]
        [224.0] [[1.0, 2.0]]
    """
    xp = array_namespace(history)
    length = history.shape[1]
    moves = xp.isfinite(pending) & (pending > 0)
    here = xp.arange(length, dtype=index.dtype)[None, :] == index[:, None]
    history = xp.where(moves[:, None] & here, pending[:, None], history)
    newest = xp.max(history, axis=1) if use_max else pending
    with np.errstate(all="ignore"):  # roles that do not move divide by zero, and are not used
        fresh = xp.zeros_like(newest) + largest
        fresh = fresh * 2.0**-margin / newest
        fresh = xp.where(xp.isfinite(fresh), fresh, xp.full_like(fresh, LARGEST_FLOAT32))
    index = xp.where(moves, (index + 1) % length, index)
    return xp.where(moves, fresh, scale), history, index


def in_order(history: Any, index: Any) -> Any:
    """Returns the history with the oldest entry first and the newest last.

    Example:
        >>> in_order(np.asarray([[3.0, 1.0, 2.0]]), np.asarray([1])).tolist()
        [[1.0, 2.0, 3.0]]
    """
    xp = array_namespace(history)
    length = history.shape[1]
    order = (index[:, None] + xp.arange(length, dtype=index.dtype)[None, :]) % length
    return xp.take_along_axis(history, order, axis=1)


def resize(history: Any, index: Any, length: int) -> tuple[Any, Any]:
    """Returns a history of another length and its index: the newest entries are kept, older ones are dropped.

    Example:
        >>> history, index = resize(np.asarray([[3.0, 1.0, 2.0]]), np.asarray([1]), 2)
        >>> history.tolist(), index.tolist()
        ([[2.0, 3.0]], [0])
    """
    xp = array_namespace(history)
    ordered = in_order(history, index)
    present = ordered.shape[1]
    if length <= present:
        return ordered[:, present - length :], xp.zeros_like(index)
    missing = xp.zeros_like(ordered[:, :1]) + xp.zeros((1, length - present), dtype=ordered.dtype)
    return xp.concat([missing, ordered], axis=1), xp.zeros_like(index)
