"""The one table of dtypes: how many bits each name has, and what a float of that name can hold.

Names are those of ml_dtypes and NumPy (`float8_e4m3fn`, `bfloat16`, `uint8`), the only spelling used anywhere in
narrowcast. `standardize` turns the dtype objects of torch, NumPy, JAX and TensorFlow into names without importing
any of them.

References:
    float16, float32, float64: IEEE 754-2019, table 3.5.
    bfloat16: Intel, BFLOAT16 - Hardware Numerics Definition, 2018, section 2.
    float8_e4m3fn, float8_e5m2: Micikevicius et al., FP8 Formats for Deep Learning, 2022, table 1.
    float8_e4m3fnuz, float8_e5m2fnuz: Noune et al., 8-bit Numerical Formats for Deep Neural Networks, 2022, section 2.
    float8_e4m3b11fnuz, float8_e3m4, float8_e4m3: the ml_dtypes documentation.
    float8_e8m0fnu, float6_e2m3fn, float6_e3m2fn, float4_e2m1fn: OCP Microscaling Formats (MX) Specification 1.0,
    2023, tables 2 to 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from narrowcast.errors import PolicyError, closest

__all__ = ["ALL", "DType", "get", "standardize"]


@dataclass(frozen=True, slots=True)
class DType:
    """What a dtype of one name can hold.

    Args:
        name: the name, as in ml_dtypes.
        bits: bits of one value. 0 for `string`, whose values have no fixed size.
        kind: `float`, `int`, `bool`, `complex` or `string`.
        is_signed: whether it holds values below zero.
        largest: the largest finite value (of the real part, for complex dtypes).
        exponent_bits: bits of a float's exponent; 0 for other kinds.
        mantissa_bits: stored bits of a float's significand, the leading one not counted; 0 for other kinds.
        smallest_normal: the smallest positive normal value of a float; 0.0 for other kinds.
        has_inf: whether a code stands for infinity.
        has_nan: whether a code stands for NaN.

    Example:
        >>> get("float8_e4m3fn").largest
        448.0
        >>> get("bfloat16").smallest_subnormal == 2.0**-133
        True
    """

    name: str
    bits: int
    kind: str
    is_signed: bool
    largest: float
    exponent_bits: int = 0
    mantissa_bits: int = 0
    smallest_normal: float = 0.0
    has_inf: bool = False
    has_nan: bool = False

    @property
    def is_floating(self) -> bool:
        """Whether it is a float (complex dtypes are not)."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer (`bool` is not)."""
        return self.kind == "int"

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value of a float; 0.0 for other kinds."""
        return math.ldexp(self.smallest_normal, -self.mantissa_bits)


def _integer(bits: int, *, is_signed: bool) -> DType:
    largest = 2 ** (bits - 1) - 1 if is_signed else 2**bits - 1
    return DType(f"int{bits}" if is_signed else f"uint{bits}", bits, "int", is_signed, largest)


def _float(
    name: str,
    bits: int,
    exponent_bits: int,
    mantissa_bits: int,
    largest: float,
    smallest_normal: float,
    special: str = "",
    *,
    is_signed: bool = True,
) -> DType:
    has_inf, has_nan = "inf" in special, "nan" in special
    return DType(
        name, bits, "float", is_signed, largest, exponent_bits, mantissa_bits, smallest_normal, has_inf, has_nan
    )


_LARGEST_32 = (2 - 2.0**-23) * 2.0**127
_LARGEST_64 = (2 - 2.0**-52) * 2.0**1023
_INTEGER_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)

ALL: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        #      name                bits  e   m  largest        smallest normal  codes that are no number
        _float("float64", 64, 11, 52, _LARGEST_64, 2.0**-1022, "inf nan"),
        _float("float32", 32, 8, 23, _LARGEST_32, 2.0**-126, "inf nan"),
        _float("float16", 16, 5, 10, 65504.0, 2.0**-14, "inf nan"),
        _float("bfloat16", 16, 8, 7, (2 - 2.0**-7) * 2.0**127, 2.0**-126, "inf nan"),
        _float("float8_e5m2", 8, 5, 2, 57344.0, 2.0**-14, "inf nan"),
        _float("float8_e5m2fnuz", 8, 5, 2, 57344.0, 2.0**-15, "nan"),
        _float("float8_e4m3", 8, 4, 3, 240.0, 2.0**-6, "inf nan"),
        _float("float8_e4m3fn", 8, 4, 3, 448.0, 2.0**-6, "nan"),
        _float("float8_e4m3fnuz", 8, 4, 3, 240.0, 2.0**-7, "nan"),
        _float("float8_e4m3b11fnuz", 8, 4, 3, 30.0, 2.0**-10, "nan"),
        _float("float8_e3m4", 8, 3, 4, 15.5, 2.0**-2, "inf nan"),
        _float("float8_e8m0fnu", 8, 8, 0, 2.0**127, 2.0**-127, "nan", is_signed=False),
        _float("float6_e3m2fn", 6, 3, 2, 28.0, 2.0**-2),
        _float("float6_e2m3fn", 6, 2, 3, 7.5, 1.0),
        _float("float4_e2m1fn", 4, 2, 1, 6.0, 1.0),
        *(_integer(bits, is_signed=True) for bits in _INTEGER_BITS),
        *(_integer(bits, is_signed=False) for bits in _INTEGER_BITS),
        DType("bool", 8, "bool", False, 1),
        DType("complex32", 32, "complex", True, 65504.0, has_inf=True, has_nan=True),
        DType("complex64", 64, "complex", True, _LARGEST_32, has_inf=True, has_nan=True),
        DType("complex128", 128, "complex", True, _LARGEST_64, has_inf=True, has_nan=True),
        DType("string", 0, "string", False, 0),
    )
}
"""Every dtype by name."""

_PYTHON_TYPES = {bool: "bool", int: "int32", float: "float32", complex: "complex64", str: "string"}


def get(name: str) -> DType:
    """Returns the record of the dtype called `name`.

    Raises:
        PolicyError: there is no dtype of this name.

    Example:
        >>> get("int8").bits
        8
    """
    try:
        return ALL[name]
    except (KeyError, TypeError):
        raise _unknown(name) from None


def standardize(value: Any) -> str:
    """Returns the name of a dtype given by name or as an object of torch, NumPy, JAX, ml_dtypes or TensorFlow.

    Python's own `float`, `int`, `bool`, `complex` and `str` mean what they mean in Keras: `float32`, `int32`, `bool`,
    `complex64` and `string`.

    Args:
        value: a name (`"bfloat16"`), or an object: `torch.bfloat16`, `numpy.float32`, `numpy.dtype("float32")`, ...

    Raises:
        PolicyError: `value` is not a dtype, or one that is not in the table.

    Example:
        >>> standardize(float)
        'float32'
        >>> standardize("bfloat61")
        Traceback (most recent call last):
            ...
        narrowcast.errors.PolicyError: Dtype is unknown. Got dtype='bfloat61'. Expected a dtype's name; did you mean \
'bfloat16'?
    """
    name = _name_of(value)
    if name not in ALL:
        raise _unknown(value)
    return name


def _name_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type) and value in _PYTHON_TYPES:
        return _PYTHON_TYPES[value]
    if type(value).__module__.partition(".")[0] == "torch":  # torch.dtype says its name only in its repr
        return str(value).rpartition(".")[2]
    for attribute in ("name", "__name__"):  # dtype objects; scalar classes
        name = getattr(value, attribute, None)
        if isinstance(name, str):
            return name
    return ""


def _unknown(value: Any) -> PolicyError:
    near = closest(str(value).rpartition(".")[2], ALL)
    return PolicyError(
        "Dtype is unknown",
        got={"dtype": value},
        expected="a dtype's name" if near else f"one of {', '.join(ALL)}",
        suggestion=near[0] if near else None,
    )
