"""int8: symmetric codes -127..127, a scale for each output channel of a weight and for each row of activations.

Names of axes: o output channel, i everything that is summed over, r row (token).

One definition for NumPy, PyTorch and JAX, in terms of the array API: all three give the same bits. A framework's kernel
may compute the same in another way; it is tested against this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from narrowcast import arrays
from narrowcast.errors import WeightError
from narrowcast.numerics import stored_form
from narrowcast.numerics.rounding import round_to_codes
from narrowcast.numerics.scaling import amax, symmetric_scale
from narrowcast.numerics.stored_form import Shape, StoredForm

__all__ = ["LARGEST", "decode", "encode", "quantize", "quantize_rows"]

LARGEST = 127
"""The largest code. -128 is not used, so that a weight and its negative have opposite codes."""


def quantize(x: Any, axis: int | tuple[int, ...]) -> tuple[Any, Any]:
    """Rounds `x` to 8 bits with one scale for all that lies along `axis`.

    `scale = 127 / amax`, `codes = round(x * scale)`, `x ≈ codes * scale_inv` with `scale_inv = 1 / scale`.

    Args:
        x: an array of floats of NumPy, PyTorch or JAX, any dtype.
        axis: the axes that share one scale.

    Returns:
        The codes, int8, the shape of `x`; and `scale_inv`, float32, `axis` kept at length 1.

    Numerics:
        In float32 whatever the dtype of `x`; to nearest, ties to even. The error of an element is at most
        `scale_inv / 2`, plus one rounding of float32. Zeros give zero codes. NaN or infinity anywhere gives zero codes
        and a `scale_inv` of NaN or infinity for all that shares its scale, so that the product is NaN.

    Example:
        >>> import numpy
        >>> codes, scale_inv = quantize(numpy.asarray([[1.0, -2.0], [0.0, 0.0]]), axis=1)
        >>> codes.tolist()
        [[64, -127], [0, 0]]
    """
    scale, scale_inv = symmetric_scale(amax(x, axis), float(LARGEST))
    with np.errstate(invalid="ignore"):  # infinity times the zero scale of its row
        # Values at the largest magnitude reach 127.00001, which rounds to 127: the clip never bites.
        return round_to_codes(arrays.cast(x, "float32") * scale, LARGEST), scale_inv


def quantize_rows(x: Any) -> tuple[Any, Any]:
    """Rounds activations to 8 bits, each row (token) with a scale of its own: `quantize` along the last axis.

    Example:
        >>> import numpy
        >>> quantize_rows(numpy.ones((2, 3, 4)))[1].shape
        (2, 3, 1)
    """
    return quantize(x, -1)


def encode(weight: Any) -> dict[str, Any]:
    """Returns the stored form of a weight: `codes`, and for each output channel the `scale` to multiply them by.

    Args:
        weight: an array of floats, output channels first, shape `(o, ...)`.

    Returns:
        `codes`, int8, the shape of `weight`; `scale`, float32, shape `(o, 1, ...)`.

    Raises:
        WeightError: the weight holds NaN or infinity.

    Example:
        >>> import numpy
        >>> encode(numpy.asarray([[0.5, -1.0]]))["codes"].tolist()
        [[64, -127]]
    """
    codes, scale_inv = quantize(weight, tuple(range(1, weight.ndim)))
    xp = array_namespace(scale_inv)
    if not bool(xp.all(xp.isfinite(scale_inv))):
        bad = xp.logical_not(xp.isfinite(arrays.cast(weight, "float32")))
        raise WeightError(
            "Weight holds NaN or infinity",
            got={"num_not_finite": int(xp.sum(arrays.cast(bad, "int32"))), "shape": tuple(weight.shape)},
            expected="finite values that float32 can hold",
            fix="Repair the weights, or give this layer the policy 'keep'",
        )
    return {"codes": codes, "scale": scale_inv}


def decode(parts: Mapping[str, Any]) -> Any:
    """Returns the weight that a stored form stands for, float32: `codes * scale`.

    Numerics:
        One float32 multiplication an element.

    Example:
        >>> import numpy
        >>> decode(encode(numpy.asarray([[0.25, -127.0]]))).tolist()
        [[0.0, -127.0]]
    """
    return arrays.cast(parts["codes"], "float32") * parts["scale"]


def _parts(shape: Shape) -> dict[str, tuple[Shape, str]]:
    return {"codes": (shape, "int8"), "scale": (shape[:1] + (1,) * (len(shape) - 1), "float32")}


stored_form.register(("int8", "int8/weight"), StoredForm(_parts, encode, decode))
