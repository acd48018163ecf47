"""The table of dtypes, held against ml_dtypes, NumPy and torch."""

from __future__ import annotations

import math

import jax.numpy
import ml_dtypes
import numpy
import pytest
import torch

from narrowcast.dtype_policies import dtypes
from narrowcast.errors import PolicyError

FLOATS = [dtype for dtype in dtypes.ALL.values() if dtype.is_floating]
INTEGERS = [dtype for dtype in dtypes.ALL.values() if dtype.is_integer]


def _scalar(name: str) -> type:
    return getattr(ml_dtypes, name, None) or getattr(numpy, name)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_float_has_the_bits_and_range_that_ml_dtypes_says(dtype):
    info = ml_dtypes.finfo(_scalar(dtype.name))
    assert (dtype.bits, dtype.exponent_bits, dtype.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert dtype.largest == float(info.max)
    assert dtype.smallest_subnormal == float(info.smallest_subnormal)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.bits <= 8], ids=lambda dtype: dtype.name)
def test_small_float_holds_exactly_what_its_codes_decode_to(dtype):
    codes = numpy.arange(2**dtype.bits, dtype=numpy.uint8).view(_scalar(dtype.name)).astype(numpy.float64)
    finite = codes[numpy.isfinite(codes)]
    assert dtype.largest == finite.max()
    assert dtype.smallest_subnormal == finite[finite > 0].min()
    assert dtype.is_signed == (finite < 0).any()
    assert dtype.has_inf == numpy.isinf(codes).any()
    assert dtype.has_nan == numpy.isnan(codes).any()


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.name != "float8_e8m0fnu"], ids=lambda dtype: dtype.name)
def test_smallest_normal_is_where_spacing_stops_shrinking(dtype):
    assert dtype.smallest_normal == float(ml_dtypes.finfo(_scalar(dtype.name)).smallest_normal)
    assert math.frexp(dtype.smallest_normal)[0] == 0.5


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.name)
def test_integer_has_the_range_of_its_bits(dtype):
    lowest = -(2 ** (dtype.bits - 1)) if dtype.is_signed else 0
    assert dtype.largest - lowest == 2**dtype.bits - 1
    assert dtype.name == ("int" if dtype.is_signed else "uint") + str(dtype.bits)


def test_every_dtype_of_torch_that_holds_plain_values_is_in_the_table():
    no_plain_values = ("bits", "qint", "quint", "_x2")  # raw bits, scaled codes of torch.ao, packed pairs
    names = {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
    missing = {name for name in names if not any(part in name for part in no_plain_values)} - set(dtypes.ALL)
    assert missing == set()


def test_every_dtype_of_ml_dtypes_is_in_the_table():
    names = {name for name, value in vars(ml_dtypes).items() if isinstance(value, type) and hasattr(value, "dtype")}
    assert {name for name in names if name not in ("finfo", "iinfo", "bcomplex32")} <= set(dtypes.ALL)


@pytest.mark.parametrize(
    "value",
    [torch.bfloat16, jax.numpy.bfloat16, ml_dtypes.bfloat16, numpy.dtype(ml_dtypes.bfloat16), "bfloat16"],
    ids=repr,
)
def test_dtype_objects_of_every_library_have_one_name(value):
    assert dtypes.standardize(value) == "bfloat16"


@pytest.mark.parametrize(
    "value, name",
    [(float, "float32"), (int, "int32"), (bool, "bool"), (complex, "complex64"), (str, "string")],
    ids=repr,
)
def test_types_of_python_mean_what_they_mean_in_keras(value, name):
    assert dtypes.standardize(value) == name


@pytest.mark.parametrize("value", [None, 5, "", "float61", object, numpy.dtype(object), torch.qint8, [], {}], ids=repr)
def test_what_is_no_dtype_is_refused(value):
    with pytest.raises(PolicyError, match="Dtype is unknown"):
        dtypes.standardize(value)


def test_get_of_an_unknown_name_says_the_nearest():
    with pytest.raises(PolicyError, match=r"Got dtype='bfloat61'. Expected a dtype's name; did you mean 'bfloat16'\?"):
        dtypes.get("bfloat61")


def test_a_name_far_from_all_lists_them():
    with pytest.raises(PolicyError, match="Expected one of float64, float32, float16"):
        dtypes.get("zzz")
