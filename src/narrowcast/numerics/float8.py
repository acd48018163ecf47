"""float8: saturating casts to 8-bit floats, and the forms in which weights are stored in them.

Names of axes: o output channel, i everything that is summed over.

Values are multiplied by a float32 `scale`, clipped to the largest float8 and cast; codes are multiplied by `scale_inv`
(see `narrowcast.numerics.scaling`). One definition for NumPy, PyTorch and JAX: all three give the same codes, save for
float32 subnormals, which XLA's CPU backend takes for zero.

References:
    Micikevicius et al., FP8 Formats for Deep Learning, 2022: the formats, and saturation in place of infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from narrowcast import arrays
from narrowcast.dtype_policies import dtypes
from narrowcast.errors import WeightError
from narrowcast.numerics import stored_form
from narrowcast.numerics.scaling import amax, saturating_scale
from narrowcast.numerics.stored_form import Shape, StoredForm

__all__ = [
    "FORWARD",
    "GRADIENT",
    "decode",
    "dequantize",
    "encode_per_channel",
    "encode_per_tensor",
    "largest",
    "quantize",
]

FORWARD = "float8_e4m3fn"
"""The dtype of inputs and weights: three bits of mantissa, because they need precision more than range."""
GRADIENT = "float8_e5m2"
"""The dtype of gradients: five bits of exponent, because they need range more than precision."""


def largest(dtype: str) -> float:
    """Returns the largest finite value of a dtype: 448 for `FORWARD`, 57344 for `GRADIENT`.

    Example:
        >>> largest(FORWARD), largest(GRADIENT)
        (448.0, 57344.0)
    """
    return dtypes.get(dtype).largest


def quantize(x: Any, scale: Any, dtype: str = FORWARD) -> Any:
    """Returns `x * scale` in a float8 dtype: clipped to its largest value, then cast.

    Args:
        x: an array of floats of NumPy, PyTorch or JAX.
        scale: what to multiply by, float32, of a shape that broadcasts with `x`.
        dtype: the float8 dtype, by name.

    Returns:
        An array of `dtype`, the shape of `x`.

    Numerics:
        In float32 whatever the dtype of `x`; to nearest, ties to even, subnormals included. What is too large, infinity
        too, becomes the largest value with its sign; NaN stays NaN. An infinity is thereby hidden: look for it in the
        amax, whose `scale_inv` tells (see `saturating_scale`). Frameworks and their versions differ in what a bare cast
        does with large values, so the clip always comes first.

    Example:
        >>> quantize(np.asarray([0.3, 500.0, np.inf], np.float32), np.float32(1.0)).astype(np.float32).tolist()
        [0.3125, 448.0, 448.0]
    """
    xp = array_namespace(x)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is clipped on the next line
        scaled = arrays.cast(x, "float32") * scale
        return arrays.cast(xp.clip(scaled, -largest(dtype), largest(dtype)), dtype)


def dequantize(codes: Any, scale_inv: Any) -> Any:
    """Returns the values that codes stand for, float32: `codes * scale_inv`, one multiplication an element.

    Example:
        >>> dequantize(quantize(np.asarray([1.0], np.float32), np.float32(4.0)), np.float32(0.25)).tolist()
        [1.0]
    """
    return arrays.cast(codes, "float32") * scale_inv


def encode_per_tensor(weight: Any) -> dict[str, Any]:
    """Returns a weight as float8 `codes` and one `scale` to multiply them by.

    Args:
        weight: an array of floats.

    Returns:
        `codes`, float8_e4m3fn, the shape of `weight`; `scale`, float32, of length 1 along every axis.

    Raises:
        WeightError: the weight holds NaN or infinity.

    Example:
        >>> encode_per_tensor(np.asarray([[0.5, -1.0]]))["scale"].tolist()
        [[0.0022321429569274187]]
    """
    return _encode(weight, tuple(range(weight.ndim)))


def encode_per_channel(weight: Any) -> dict[str, Any]:
    """Returns a weight as float8 `codes` and, for each output channel, the `scale` to multiply them by.

    Args:
        weight: an array of floats, output channels first, shape `(o, ...)`.

    Returns:
        `codes`, float8_e4m3fn, the shape of `weight`; `scale`, float32, shape `(o, 1, ...)`.

    Raises:
        WeightError: the weight holds NaN or infinity.

    Example:
        >>> decode(encode_per_channel(np.asarray([[448.0, 3.0], [7.0, 0.0]]))).tolist()
        [[448.0, 3.0], [7.0, 0.0]]
    """
    return _encode(weight, tuple(range(1, weight.ndim)))


def _encode(weight: Any, axes: tuple[int, ...]) -> dict[str, Any]:
    scale, scale_inv = saturating_scale(amax(weight, axes), largest(FORWARD))
    xp = array_namespace(scale_inv)
    if not bool(xp.all(xp.isfinite(scale_inv))):
        bad = xp.logical_not(xp.isfinite(arrays.cast(weight, "float32")))
        raise WeightError(
            "Weight holds NaN or infinity",
            got={"num_not_finite": int(xp.sum(arrays.cast(bad, "int32"))), "shape": tuple(weight.shape)},
            expected="finite values that float32 can hold",
            fix="Repair the weights, or give this layer the policy 'keep'",
        )
    return {"codes": quantize(weight, scale), "scale": scale_inv}


def decode(parts: Mapping[str, Any]) -> Any:
    """Returns the weight that a stored form stands for, float32: `codes * scale`.

    Example:
        >>> decode(encode_per_tensor(np.asarray([[2.0, -4.0]]))).tolist()
        [[2.0, -4.0]]
    """
    return dequantize(parts["codes"], parts["scale"])


def _parts_per_tensor(shape: Shape) -> dict[str, tuple[Shape, str]]:
    return {"codes": (shape, FORWARD), "scale": ((1,) * len(shape), "float32")}


def _parts_per_channel(shape: Shape) -> dict[str, tuple[Shape, str]]:
    return {"codes": (shape, FORWARD), "scale": (shape[:1] + (1,) * (len(shape) - 1), "float32")}


stored_form.register(("float8/static",), StoredForm(_parts_per_tensor, encode_per_tensor, decode))
stored_form.register(("float8/dynamic", "float8/weight"), StoredForm(_parts_per_channel, encode_per_channel, decode))
