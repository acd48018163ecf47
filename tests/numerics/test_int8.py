"""int8 codes: what other libraries give, exact arithmetic, and the same bits in every framework."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast.errors import WeightError
from narrowcast.numerics import int8, stored_form
from narrowcast.numerics.scaling import SMALLEST_AMAX
from tests.numerics.arrays import FRAMEWORKS, assert_same_bits, back

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "int8_vectors.json").read_text("utf-8"))


def floats(patterns):
    return np.asarray([[int(bits, 16) for bits in row] for row in patterns], np.uint32).view(np.float32)


X = floats(VECTORS["x"])
SPECIALS = np.asarray(
    [
        [0.0, -0.0, 0.0, 0.0],
        [np.nan, 1.0, 2.0, -3.0],
        [np.inf, 1.0, -2.0, 0.0],
        [-np.inf, np.inf, np.nan, 0.0],
        [1e-45, -1e-45, 0.0, 0.0],
        [1e-38, -5e-39, 1e-40, 0.0],
        [3.4028235e38, -3.4028235e38, 1e38, 0.0],
        [0.5, 0.25, -0.25, 0.125],
        [127.0, 63.5, 62.5, -0.5],
    ],
    np.float32,
)


def random(seed=0, shape=(257, 129)):
    rng = np.random.default_rng(seed)
    # Magnitudes over 60 powers of two, so that scales are of every size.
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, (shape[0], 1))).astype(np.float32)


@pytest.mark.parametrize("axis, name", [(1, "keras_rows"), (0, "keras_columns")])
def test_codes_are_those_of_keras_but_for_ties_that_its_epsilon_breaks(axis, name):
    codes, _ = int8.quantize(X, axis)
    theirs = np.asarray(VECTORS[name]["q"])
    amax = np.abs(X).max(axis, keepdims=True).astype(np.float64)
    exact = np.divide(X * 127.0, amax, out=np.zeros_like(X, dtype=np.float64), where=amax > 0)
    # Keras adds 1e-7 to the amax: only values that lie on a tie without it can differ.
    tie = np.abs(exact - np.trunc(exact)) == 0.5
    assert (codes == theirs)[~tie].all()
    assert tie.sum() < 6


def test_the_scale_is_that_of_keras_but_for_its_epsilon():
    _, scale_inv = int8.quantize(X, 1)
    theirs = floats([VECTORS["keras_rows"]["scale_divide_on_dequant"]])[0]
    nonzero = np.abs(X).max(1) > 0
    # Keras: 127 / (amax + 1e-7); the smallest amax of the vectors is about 0.01, so 1e-5 relative.
    np.testing.assert_allclose(1 / scale_inv[nonzero, 0], theirs[nonzero], rtol=2e-5)


def test_codes_are_those_of_torchao_where_the_largest_magnitude_is_positive():
    codes, scale_inv = int8.quantize(X, 1)
    theirs = VECTORS["torchao_no_clipping_rows"]
    # There torchao's scale is amax / 127 as well; elsewhere it is amax / 128.
    rows = (X.max(1) == np.abs(X).max(1)) & (X.max(1) > 0)
    assert rows.sum() >= 2
    assert (codes == np.asarray(theirs["q"]))[rows].all()
    np.testing.assert_allclose(scale_inv[rows, 0], floats([theirs["scale"]])[0][rows], rtol=2.0**-22)


def test_codes_are_the_nearest_integers_of_exact_arithmetic():
    x = random(shape=(20, 30))
    codes, _ = int8.quantize(x, 1)
    for row, row_codes in zip(x, codes, strict=True):
        amax = max(abs(Fraction(float(v))) for v in row)
        for value, code in zip(row, row_codes, strict=True):
            exact = Fraction(float(value)) * 127 / amax
            # Half a step, and three float32 roundings of numbers up to 127.
            assert abs(exact - int(code)) <= Fraction(1, 2) + 127 * 3 * Fraction(1, 2**24)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_frameworks_give_the_same_bits(framework, dtype, axis):
    with np.errstate(over="ignore"):
        x = random().astype(dtype)
    expected = int8.quantize(x, axis)
    actual = int8.quantize(FRAMEWORKS[framework](x), axis)
    assert_same_bits(actual[0], expected[0])
    assert_same_bits(actual[1], expected[1])


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_frameworks_give_the_same_bits_for_special_values(framework):
    actual, expected = int8.quantize(FRAMEWORKS[framework](SPECIALS), 1), int8.quantize(SPECIALS, 1)
    # XLA on CPUs reads subnormals as zero, so their rows may only differ in values below the smallest scale.
    rows = np.asarray([True, True, True, True, framework != "jax", framework != "jax", True, True, True])
    assert_same_bits(back(actual[0])[rows], expected[0][rows])
    assert_same_bits(actual[1], expected[1])


def test_jit_gives_the_same_codes_and_scales():
    import jax

    x = random()
    actual = jax.jit(int8.quantize_rows)(x)
    expected = int8.quantize_rows(x)
    assert_same_bits(actual[0], expected[0])
    # XLA rewrites 1 / (127 / amax) as amax * (1 / 127), which is off by at most one unit in the last place.
    np.testing.assert_allclose(back(actual[1]), expected[1], rtol=2.0**-23)


def test_float64_is_rounded_to_float32_first():
    x = np.asarray([[1.0 + 2.0**-40, -127.0]])
    assert int8.quantize(x, 1)[1].dtype == np.float32
    assert int8.quantize(x, 1)[0].tolist() == [[1, -127]]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_zero_rows_give_zero_codes_and_finite_scales(framework):
    codes, scale_inv = int8.quantize(FRAMEWORKS[framework](np.zeros((2, 3), np.float32)), 1)
    assert not back(codes).any()
    assert np.isfinite(back(scale_inv)).all()
    assert (back(scale_inv) > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_row_with_a_value_that_is_not_finite_comes_back_as_nan_and_others_stay(framework, bad):
    x = np.asarray([[1.0, bad, 0.0], [1.0, 2.0, 3.0]], np.float32)
    codes, scale_inv = (back(part) for part in int8.quantize(FRAMEWORKS[framework](x), 1))
    with np.errstate(invalid="ignore"):
        y = codes * scale_inv
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_no_code_is_minus_128():
    assert int8.quantize(random(3), 1)[0].min() == -127


def test_a_weight_and_its_negative_have_opposite_codes():
    w = random(4)
    np.testing.assert_array_equal(int8.encode(w)["codes"], -int8.encode(-w)["codes"])


def test_an_element_is_off_by_at_most_half_a_step():
    w = random(5)
    parts = int8.encode(w)
    error = np.abs(int8.decode(parts).astype(np.float64) - w)
    # Half a step, and two roundings of the largest value on the way there and back.
    assert (error <= parts["scale"] * (0.5 + 2 * 127 * 2.0**-23)).all()


def test_encoding_what_was_decoded_changes_nothing():
    parts = int8.encode(random(6))
    again = int8.encode(int8.decode(parts))
    np.testing.assert_array_equal(again["codes"], parts["codes"])
    np.testing.assert_allclose(again["scale"], parts["scale"], rtol=2.0**-22)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_with_the_number_of_such_values(framework, bad):
    w = np.ones((4, 3), np.float32)
    w[1, 1] = w[3, 2] = bad
    with pytest.raises(
        WeightError, match=r"Weight holds NaN or infinity. Got num_not_finite=2, shape=\(4, 3\)."
    ) as info:
        int8.encode(FRAMEWORKS[framework](w))
    assert "keep" in info.value.fix


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0), (5, 0, 3)])
def test_empty_weights_have_a_stored_form(shape):
    parts = int8.encode(torch.zeros(shape))
    assert parts["codes"].shape == shape
    assert parts["scale"].shape == (shape[0], *(1,) * (len(shape) - 1))
    assert torch.isfinite(parts["scale"]).all()


@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 3, 2), (2, 3, 4, 5)])
def test_the_stored_form_has_the_shapes_and_dtypes_it_says(shape):
    form = stored_form.of("int8")
    parts = form.encode(np.ones(shape, np.float32))
    said = form.tensors("weight", shape)
    assert {f"weight_{part}": (x.shape, x.dtype.name) for part, x in parts.items()} == said
    assert form.num_bytes(shape) == sum(x.nbytes for x in parts.values())


def test_the_smallest_amax_gives_normal_scales():
    _, scale_inv = int8.quantize(np.asarray([[SMALLEST_AMAX / 2]], np.float32), 1)
    assert scale_inv[0, 0] > np.finfo(np.float32).smallest_normal
