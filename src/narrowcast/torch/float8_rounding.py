"""Rounding to float8 in float32: the emulation's inner loop, several times faster than a cast there and back.

Adding and taking away a number 1.5 * 2**(23 - m) times as large as the value's power of two (m bits of mantissa) leaves
exactly those digits that float8 has, rounded to nearest with ties to even by float32's own addition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.dtype_policies import dtypes
from narrowcast.numerics import float8

__all__ = ["FORWARD", "GRADIENT", "Format", "amax", "round_to"]

_EXPONENT = 0x7F800000
_PIECE = 2**17


class Format(NamedTuple):
    """What rounding to a float8 dtype needs, as plain numbers that `torch.compile` takes for constants.

    Args:
        dtype: the dtype.
        largest: its largest value.
        smallest_normal: below it values are multiples of one step.
        addend: how many times a value's power of two is added and taken away.
    """

    dtype: torch.dtype
    largest: float
    smallest_normal: float
    addend: float


def _format(name: str) -> Format:
    record = dtypes.get(name)
    addend = 1.5 * 2.0 ** (dtypes.get("float32").mantissa_bits - record.mantissa_bits)
    return Format(getattr(torch, name), record.largest, record.smallest_normal, addend)


FORWARD = _format(float8.FORWARD)
GRADIENT = _format(float8.GRADIENT)


def round_to(x: Tensor, scale: Tensor, to: Format, *, clip: bool = True) -> Tensor:
    """Returns `x * scale` rounded to values of a float8 dtype, as float32.

    Args:
        x: floats, any shape and strides.
        scale: float32, of a shape that broadcasts with `x`.
        to: the format.
        clip: whether values can be too large. Not so where the scale comes from the present amax.

    Returns:
        A new tensor, float32, the shape of `x`.

    Numerics:
        Equal to `narrowcast.numerics.float8.quantize` for every value, save that negative values that round to zero
        come out as +0. Without `clip`, infinity becomes NaN.

    Example:
        >>> round_to(torch.tensor([0.3, 500.0, 0.001]), torch.tensor(1.0), FORWARD).tolist()
        [0.3125, 448.0, 0.001953125]
    """
    y = x * scale if x.dtype is torch.float32 else x.float().mul_(scale)
    if y.numel() <= _PIECE or y.device.type != "cpu" or torch.compiler.is_compiling() or not y.is_contiguous():
        return _round(y, None, to, clip=clip)
    # The powers of two of a large tensor would be a tensor as large, at addresses that no cache holds.
    powers = torch.empty(_PIECE, dtype=torch.int32)
    for piece in torch.split(y.view(-1), _PIECE):
        _round(piece, powers[: piece.numel()], to, clip=clip)
    return y


def _round(y: Tensor, powers: Tensor | None, to: Format, *, clip: bool) -> Tensor:
    """Rounds `y` in place. `powers` is memory for its powers of two, int32."""
    if clip:
        y.clamp_(-to.largest, to.largest)
    bits = y.view(torch.int32)
    bits = bits & _EXPONENT if powers is None else torch.bitwise_and(bits, _EXPONENT, out=powers)
    power = bits.view(torch.float32).clamp_min_(to.smallest_normal)
    return y.add_(power, alpha=to.addend).sub_(power, alpha=to.addend)


def amax(x: Tensor) -> Tensor:
    """Returns the largest magnitude in `x`, float32, no axes; NaN where `x` holds one.

    Example:
        >>> amax(torch.tensor([1.0, -3.0]))
        tensor(3.)
    """
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()  # not -low, which would make -0 of 0
