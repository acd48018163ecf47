"""Measures of error against their definitions in exact cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from narrowcast.numerics import cosine, largest_error, relative_error, sqnr_db
from tests.numerics.arrays import FRAMEWORKS


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_every_framework_measures_the_same(framework):
    make = FRAMEWORKS[framework]
    actual, expected = make(np.asarray([3.0, 4.5], np.float32)), make(np.asarray([3.0, 4.0], np.float32))
    assert relative_error(actual, expected) == pytest.approx(0.1, rel=1e-15)
    assert sqnr_db(actual, expected) == pytest.approx(20.0, rel=1e-12)
    assert cosine(actual, expected) == pytest.approx(27 / (math.sqrt(29.25) * 5), rel=1e-15)
    assert largest_error(actual, expected) == 0.5


def test_sums_do_not_overflow_or_round_in_the_dtype_of_the_values():
    # In bfloat16 a sum of 1,000 ones stops at 256.
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert cosine(ones, ones) == pytest.approx(1.0, abs=1e-15)
    huge = torch.full((4,), 60000.0, dtype=torch.float16)
    assert relative_error(huge / 2, huge) == pytest.approx(0.5, abs=1e-15)


def test_equal_arrays_have_no_error():
    x = np.ones(3)
    assert (relative_error(x, x), sqnr_db(x, x), largest_error(x, x)) == (0.0, math.inf, 0.0)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0


def test_an_error_against_zero_is_infinite():
    assert relative_error(np.ones(2), np.zeros(2)) == math.inf
    assert math.isnan(cosine(np.ones(2), np.zeros(2)))


def test_nan_is_not_hidden():
    x = np.asarray([1.0, np.nan])
    assert math.isnan(relative_error(x, np.ones(2)))
    assert math.isnan(largest_error(x, np.ones(2)))


def test_empty_arrays_have_no_error():
    assert largest_error(np.zeros(0), np.zeros(0)) == 0.0


def test_arrays_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"differ in shape. Got actual=\(2,\), expected=\(2, 1\)"):
        relative_error(np.ones(2), np.ones((2, 1)))
