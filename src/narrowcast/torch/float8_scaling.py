"""The scale of one tensor at one use: from the state or from the data, with its inverse, and what is recorded.

There are two forms of this. Tensors all the way, which every device runs and `torch.compile` follows in one graph; and
plain numbers, for tensors of the CPU outside of a trace, where reading a number costs nothing and an operator on one
element costs as much as on a thousand. Both give the same bits.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.numerics.scaling import LARGEST_FLOAT32
from narrowcast.torch.float8_rounding import Format, Number, amax, is_read_free

__all__ = ["Scaling", "current_scale", "scaling_of", "snapshot"]

_FLOAT32 = struct.Struct("f")
_LITTLE = 1 + 2.0**-6
"""What is larger than the largest value by less than this rounds to it, so it needs no clipping."""


class Scaling(NamedTuple):
    """How a tensor is rounded.

    Args:
        scale: what it is multiplied by, float32: a tensor of one element, or a number.
        inverse: its reciprocal; NaN where the tensor holds NaN or infinity.
        clip: whether values may be too large.
    """

    scale: Number
    inverse: Number
    clip: bool


def snapshot(stored: Tensor | None, role: int, x: Tensor) -> Number | None:
    """Returns the stored scale of a role as it is now, whatever becomes of the state later; `None` where there is none.

    Args:
        stored: the scales of some roles, float32; `None` for recipes without state.
        role: which of them.
        x: a tensor that is used with it; decides between the two forms.
    """
    if stored is None:
        return None
    return stored[role].item() if is_read_free(x) else stored[role : role + 1].clone()


def scaling_of(x: Tensor, stored: Number | None, pending: Tensor | None, to: Format, margin: int = 0) -> Scaling:
    """Returns how `x` is rounded, and records its amax.

    Args:
        x: floats, at least one element.
        stored: the stored scale, as `snapshot` gives it; 0 where nothing is known yet, `None` for recipes without
            state. Both take the scale from `x`.
        pending: the pending amax, one element, merged in place; `None`: nothing is recorded.
        to: the format that `x` is rounded to.
        margin: powers of two to stay below its largest value where the scale comes from `x`.

    Numerics:
        `narrowcast.numerics.scaling.saturating_scale` and `narrowcast.numerics.delayed_scaling.merge`.
    """
    if is_read_free(x):
        low, high = torch.aminmax(x)
        return _by_numbers(max(abs(low.item()), abs(high.item())), stored, pending, to, margin)
    magnitude = amax(x).reshape(1)
    scale = current_scale(magnitude, to.largest, margin)
    if stored is not None:
        held = stored if isinstance(stored, Tensor) else torch.full_like(scale, stored)
        scale = torch.where(held > 0, held, scale)
    if pending is not None:
        pending.copy_(torch.maximum(pending, magnitude.nan_to_num(0.0, 0.0)))
    # 0 times a magnitude that is not finite is NaN.
    return Scaling(scale, torch.add(scale.reciprocal(), magnitude, alpha=0.0), clip=stored is not None)


def _by_numbers(magnitude: float, stored: Number | None, pending: Tensor | None, to: Format, margin: int) -> Scaling:
    # Quotients of two float32, computed in double precision and rounded to float32, are the float32 quotients.
    magnitude = _float32(magnitude)
    if not math.isfinite(magnitude):
        return Scaling(float(stored or 0.0) or 1.0, math.nan, clip=True)
    if pending is not None and magnitude > pending.item():
        pending.fill_(magnitude)
    scale = float(stored or 0.0)
    if not scale > 0:
        quotient = to.largest * 2.0**-margin / magnitude if magnitude > 0 else math.inf
        scale = _float32(min(quotient, LARGEST_FLOAT32))
    return Scaling(scale, _float32(1.0 / scale), clip=magnitude * scale > to.largest * _LITTLE)


def _float32(value: float) -> float:
    try:
        result: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return result


def current_scale(amax: Tensor, largest: float, margin: int = 0) -> Tensor:
    """Returns the scale of an amax, of the same shape, in two operators.

    Numerics:
        Where the amax is finite and above 0, that of `narrowcast.numerics.scaling.saturating_scale`. An amax of 0 gives
        the largest float32 and not 1, which zeros do not tell apart. Infinity gives 0 and NaN gives NaN: with the
        reciprocal as its inverse, all that shares the scale becomes NaN.

    Example:
        >>> current_scale(torch.tensor([1.0, 2.0, torch.inf]), 448.0).tolist()
        [448.0, 224.0, 0.0]
    """
    return (torch.full_like(amax, largest * 2.0**-margin) / amax).clamp_max_(LARGEST_FLOAT32)
