"""What rounding to a narrow dtype does to a tensor, as a handful of sums from one pass over a sample of it.

Sums add up over calls, steps and uses of a module; the ratios are taken at the end. Nothing here waits for a device:
results are small tensors on the tensor's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from narrowcast.dtype_policies import dtypes
from narrowcast.dtype_policies.dtypes import DType
from narrowcast.numerics.scaling import symmetric_scale
from narrowcast.torch.float8_scaling import current_scale

__all__ = ["FIELDS", "HISTOGRAM", "NUM_FIELDS", "Groups", "Narrow", "compare", "measure", "sample"]

FIELDS = ("amax", "scale", "elements", "nonzero", "subnormal", "kept", "saturated", "signal", "noise")
"""What the first entries of a row of statistics are. `nonzero` counts elements that are not zero before rounding,
`kept` those that are not zero after it; `signal` and `noise` are sums of squares."""

HISTOGRAM = range(-64, 64)
"""The exponents that a row counts after its fields: magnitudes in `[2**e, 2**(e + 1))`, the ends holding what lies
beyond."""

NUM_FIELDS = len(FIELDS)
_FLOAT32_BIAS = 127
_SQUARE = 128


class Groups(Enum):
    """Which elements of a tensor share a scale."""

    NONE = "no scale"
    TENSOR = "the whole tensor"
    ROW = "each row along the last axis"
    BLOCK = "each 128 elements along the last axis"
    SQUARE = "each square of 128 by 128"


@dataclass(frozen=True, slots=True)
class Narrow:
    """How a tensor is rounded.

    Args:
        dtype: to what, by name.
        groups: which elements share a scale.
        scale: the scale in use, a float32 tensor of one element. `None`, or 0 in it, where the scale follows from the
            largest magnitude of each group, as `narrowcast.numerics.scaling` defines it.
    """

    dtype: str
    groups: Groups = Groups.NONE
    scale: Tensor | None = None


def sample(x: Tensor, groups: Groups, max_elements: int, offset: int) -> Tensor:
    """Takes elements of `x`, spread over it, in whole groups.

    Args:
        x: a tensor of any shape and floating dtype, not empty.
        groups: which elements have to stay together.
        max_elements: how many at most; one group at least.
        offset: where to begin; another offset takes other elements.

    Returns:
        float32, shape `(groups, elements of a group)`; one row where elements need not stay together.
    """
    if groups in (Groups.NONE, Groups.TENSOR):
        step = -(-x.numel() // max_elements)
        # A stride that shares no factor with the rows' length reaches every column.
        while step > 1 and math.gcd(step, x.shape[-1]) != 1:
            step += 1
        return x.reshape(-1)[offset % step :: step].float()[None]
    width = x.shape[-1] if x.ndim else 1
    rows = x.reshape(-1, width)
    if groups is Groups.SQUARE and min(rows.shape) >= _SQUARE:
        top, left = (_SQUARE * ((offset * 7) % (size // _SQUARE)) for size in rows.shape)
        return rows[top : top + _SQUARE, left : left + _SQUARE].float().reshape(1, -1)
    step = -(-rows.shape[0] // max(1, max_elements // width))
    chosen = rows[offset % step :: step]
    if groups is not Groups.ROW and width > _SQUARE:
        chosen = chosen[:, : width - width % _SQUARE].reshape(-1, _SQUARE)
    return chosen.float()


def measure(x: Tensor, narrow: Narrow | None, *, max_elements: int, offset: int = 0) -> Tensor:
    """Returns one row of statistics of a tensor and of what rounding does to it.

    Args:
        x: a tensor of any shape and floating dtype; not changed, and not kept.
        narrow: how it is rounded; `None` where it is not: then only the fields that do not speak of rounding count.
        max_elements: how many elements to sample; `amax` comes from all.
        offset: as in `sample`.

    Returns:
        float32, shape `(NUM_FIELDS + len(HISTOGRAM),)`. `amax` is NaN or infinite where the tensor holds either;
        `scale` is 0 where the tensor has not one scale. The other fields are sums over the sample's finite elements.

    Numerics:
        Values are scaled and rounded in float32 as `narrowcast.numerics` defines it: saturated, to nearest, ties to
        even. An element counts as saturated if it is rounded to beyond the largest value, so not if it is merely just
        above it.

    Example:
        >>> row = measure(torch.tensor([1.0, 1e-4, 500.0]), Narrow("float8_e4m3fn"), max_elements=8)
        >>> [row[FIELDS.index(name)].item() for name in ("amax", "nonzero", "kept", "saturated")]
        [500.0, 3.0, 2.0, 1.0]
    """
    x = x.detach()
    if not x.numel():
        return x.new_zeros(NUM_FIELDS + len(HISTOGRAM), dtype=torch.float32)
    low, high = torch.aminmax(x)
    amax = torch.maximum(-low, high).float()
    values = sample(x, narrow.groups if narrow is not None else Groups.NONE, max_elements, offset)
    # A sum with one NaN in it says nothing, so what is not finite is left out, of the count too, and told by amax.
    num_finite = torch.count_nonzero(values.isfinite())
    values = values.nan_to_num(0.0, 0.0, 0.0)
    magnitudes = values.abs()
    nonzero = torch.count_nonzero(values)
    zero = amax.new_zeros(())
    scale = zero
    subnormal = kept = saturated = noise = zero
    if narrow is not None:
        dtype = dtypes.get(narrow.dtype)
        factor, inverse = _scales(narrow, dtype, amax, magnitudes)
        scaled = values if factor is None else values * factor
        rounded = _round(scaled, dtype)
        size = magnitudes if factor is None else scaled.abs()
        kept = torch.count_nonzero(rounded)
        saturated = torch.count_nonzero(size > _beyond(dtype))
        subnormal = nonzero - torch.count_nonzero(size >= dtype.smallest_normal)
        error = (rounded if inverse is None else rounded * inverse) - values
        noise = _square_sum(error)
        if factor is not None and factor.numel() == 1 and narrow.groups is Groups.TENSOR:
            scale = factor.reshape(())
    fields = (amax, scale, num_finite, nonzero, subnormal, kept, saturated, _square_sum(values), noise)
    return torch.cat([torch.stack([field.float() for field in fields]), _histogram(magnitudes)])


def compare(row: Tensor, actual: Tensor, expected: Tensor) -> Tensor:
    """Puts into a row of statistics, in place of its signal and noise, those of an output against what it should be.

    Args:
        row: what `measure` returned for the output.
        actual: a part of the output.
        expected: the same part in float32, computed without rounding.
    """
    error = (actual.float() - expected).nan_to_num(0.0, 0.0, 0.0)
    row[FIELDS.index("signal")] = _square_sum(expected.nan_to_num(0.0, 0.0, 0.0))
    row[FIELDS.index("noise")] = _square_sum(error)
    return row


def _scales(narrow: Narrow, dtype: DType, amax: Tensor, magnitudes: Tensor) -> tuple[Any, Any]:
    """What values are multiplied by before and after rounding; `None` twice where there is no scale."""
    if narrow.groups is Groups.NONE:
        return None, None
    shared = amax if narrow.groups is Groups.TENSOR else magnitudes.amax(-1, keepdim=True)
    if dtype.is_integer:
        factor, inverse = symmetric_scale(shared.nan_to_num(1.0, 1.0, 1.0), dtype.largest)
        return factor, inverse
    factor = current_scale(shared, dtype.largest)
    if narrow.scale is not None:
        factor = torch.where(narrow.scale > 0, narrow.scale, factor)
    return factor, 1.0 / factor


def _round(x: Tensor, dtype: DType) -> Tensor:
    clipped = x.clamp(-dtype.largest, dtype.largest)
    if dtype.is_integer:
        return clipped.round()
    return clipped.to(getattr(torch, dtype.name)).float()


def _beyond(dtype: DType) -> float:
    """The magnitude from which a value no longer rounds to the largest one: half a unit in the last place above it."""
    if dtype.is_integer:
        return dtype.largest + 0.5
    exponent = math.frexp(dtype.largest)[1] - 1
    return dtype.largest + math.ldexp(0.5, exponent - dtype.mantissa_bits)


def _square_sum(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


def _histogram(magnitudes: Tensor) -> Tensor:
    exponents = (magnitudes.reshape(-1).view(torch.int32) >> 23) - _FLOAT32_BIAS
    places = exponents.clamp_(HISTOGRAM.start - 1, HISTOGRAM.stop - 1).sub_(HISTOGRAM.start - 1)
    counts = torch.bincount(places, minlength=len(HISTOGRAM) + 1)
    # Zeros and what lies below the first exponent fall into the same place; zeros are taken out again.
    below = counts[0] - (magnitudes.numel() - torch.count_nonzero(magnitudes))
    found = counts[1:].float()
    found[0] += below
    return found
