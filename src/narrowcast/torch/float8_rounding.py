"""Rounding to float8 in float32: the emulation's inner loop, several times faster than a cast there and back.

Adding and taking away a number 1.5 * 2**(23 - m) times as large as the value's power of two (m bits of mantissa) leaves
exactly those digits that float8 has, rounded to nearest with ties to even by float32's own addition.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import dtypes
from narrowcast.numerics import float8

__all__ = ["FORWARD", "GRADIENT", "Format", "Number", "amax", "is_read_free", "round_to"]

Number = Tensor | float

_EXPONENT = 0x7F800000
_PIECE = 2**18
"""So many elements are rounded at a time: they and their powers of two fit into caches, and are work for some cores."""
_MAX_SCRATCH = 2**22
_PLAIN = (Tensor, nn.Parameter)


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


def round_to(x: Tensor, scale: Number, to: Format, *, clip: bool = True, scratch: str | None = None) -> Tensor:
    """Returns `x * scale` rounded to values of a float8 dtype, as float32.

    Args:
        x: floats, any shape and strides.
        scale: float32, of a shape that broadcasts with `x`; or a number that float32 holds.
        to: the format.
        clip: whether values can be too large. Not so where the scale comes from the present amax.
        scratch: a name, for a result that is gone before the next of this name is made in this thread: it may then lie
            in memory that is used again. The pages of fresh memory cost more than rounding does.

    Returns:
        A new tensor, or scratch memory, float32, the shape of `x`.

    Numerics:
        Equal to `narrowcast.numerics.float8.quantize` for every value, save that negative values that round to zero
        come out as +0. Without `clip`, infinity becomes NaN.

    Example:
        >>> round_to(torch.tensor([0.3, 500.0, 0.001]), torch.tensor(1.0), FORWARD).tolist()
        [0.3125, 448.0, 0.001953125]
    """
    is_one_scale = not isinstance(scale, Tensor) or scale.numel() == 1
    if not (is_one_scale and is_read_free(x) and x.is_contiguous()):
        y = x * scale if x.dtype is torch.float32 else x.float().mul_(scale)
        if clip:
            y.clamp_(-to.largest, to.largest)
        return _round(y, y.view(torch.int32) & _EXPONENT, to)
    y = _memory.floats(scratch, x)
    factor = scale.reshape(()) if isinstance(scale, Tensor) else _memory.factor.fill_(scale)
    # Piece by piece, so that each piece is in the caches for all passes over it.
    for source, piece in zip(torch.split(x.view(-1), _PIECE), torch.split(y.view(-1), _PIECE), strict=True):
        if source.dtype is torch.float32:
            torch.mul(source, factor, out=piece)
        else:
            piece.copy_(source).mul_(factor)
        if clip:
            piece.clamp_(-to.largest, to.largest)
        bits = torch.bitwise_and(piece.view(torch.int32), _memory.exponent, out=_memory.powers[: piece.numel()])
        _round(piece, bits, to)
    return y


def _round(y: Tensor, bits: Tensor, to: Format) -> Tensor:
    """Rounds `y` in place; `bits` are its powers of two and are written to."""
    power = bits.view(torch.float32).clamp_min_(to.smallest_normal)
    return y.add_(power, alpha=to.addend).sub_(power, alpha=to.addend)


class _Memory(threading.local):
    """Memory of a thread that is used again and again: for powers of two, and for results that are soon gone."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.powers = torch.empty(_PIECE, dtype=torch.int32, device="cpu")
            # A Python number costs an operator that writes to given memory another operator: these are tensors.
            self.exponent = torch.tensor(_EXPONENT, dtype=torch.int32, device="cpu")
            self.factor = torch.empty((), dtype=torch.float32, device="cpu")
        self._scratch: dict[str, Tensor] = {}

    def floats(self, name: str | None, like: Tensor) -> Tensor:
        """Memory for float32 in the shape of a tensor: fresh without a name, or if it would be much to hold on to."""
        size = like.numel()
        if name is None or size > _MAX_SCRATCH:
            return torch.empty(like.shape, dtype=torch.float32, device="cpu")
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):
                held = self._scratch[name] = torch.empty(size, dtype=torch.float32, device="cpu")
        return held[:size].view(like.shape)


_memory = _Memory()


def is_read_free(x: Tensor) -> bool:
    """Says whether numbers may be read from `x` and tensors beside it: on the CPU, and not while tracing."""
    return x.device.type == "cpu" and type(x) in _PLAIN and not torch.compiler.is_compiling()


def amax(x: Tensor) -> Tensor:
    """Returns the largest magnitude in `x`, float32, no axes; NaN where `x` holds one.

    Example:
        >>> amax(torch.tensor([1.0, -3.0]))
        tensor(3.)
    """
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()  # not -low, which would make -0 of 0
