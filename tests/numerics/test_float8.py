"""float8 codes: every midpoint and its neighbours, what other libraries give, and the same codes in every framework."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast import arrays
from narrowcast.errors import WeightError
from narrowcast.numerics import float8, stored_form
from narrowcast.numerics.scaling import amax, block_amax, expand_blocks, saturating_scale
from tests.numerics.arrays import FRAMEWORKS, assert_same_bits, back

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "float8_vectors.json").read_text("utf-8"))
DTYPES = ("float8_e4m3fn", "float8_e5m2")
EVERY_DTYPE = (*DTYPES, "float8_e4m3fnuz", "float8_e5m2fnuz")


def floats(patterns):
    return np.asarray([int(bits, 16) for bits in np.ravel(patterns)], np.uint32).view(np.float32)


def codes_of(array):
    if isinstance(array, torch.Tensor):
        return array.view(torch.uint8).numpy()
    return np.asarray(array).view(np.uint8)


def is_nan_code(codes, dtype):
    return np.isnan(np.asarray(codes, np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float32))


def assert_same_codes(actual, expected, dtype):
    """Equal code for code; NaN has several codes and equals NaN."""
    actual, expected = codes_of(actual).ravel(), np.asarray(expected, np.uint8).ravel()
    nan = is_nan_code(expected, dtype)
    np.testing.assert_array_equal(is_nan_code(actual, dtype), nan)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])


def random(seed=0, num=1_000_000):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(num) * 2.0 ** rng.integers(-24, 20, num)).astype(np.float32)
    specials = [0.0, -0.0, np.inf, -np.inf, np.nan, 448.0, 464.0, 464.0001, 57344.0, 61440.0, 3.4e38, -3.4e38, 1e-30]
    x[: len(specials)] = specials
    return x


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_every_midpoint_and_its_neighbours_round_to_the_expected_code(framework, dtype):
    case = VECTORS["casts"][dtype]
    codes = float8.quantize(FRAMEWORKS[framework](floats(case["input_f32"])), 1.0, dtype)
    assert_same_codes(codes, case["saturating"], dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_to_16_bits_round_to_the_expected_code(framework, dtype):
    case = VECTORS["casts"][dtype]
    with np.errstate(over="ignore"):  # NumPy says so where a value becomes infinity
        narrow = arrays.cast(FRAMEWORKS[framework](floats(case["input_f32"])), dtype)
    found = back(arrays.cast(narrow, "float32"))
    expected = np.asarray(case["code"], np.uint16).view(getattr(ml_dtypes, dtype, np.float16)).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_float32_is_rounded_once_and_never_by_way_of_16_bits(framework):
    for case in VECTORS["casts"]["double_rounding"]["e4m3fn"]:
        x = FRAMEWORKS[framework](floats([case["f32"]]))
        assert codes_of(float8.quantize(x, 1.0)).tolist() == [case["direct"]]
        assert codes_of(float8.quantize(arrays.cast(x, "bfloat16"), 1.0)).tolist() == [case["via_bfloat16"]]
        assert codes_of(float8.quantize(arrays.cast(x, "float16"), 1.0)).tolist() == [case["via_float16"]]


def test_float64_is_rounded_to_float32_first_as_everywhere():
    case = VECTORS["casts"]["double_rounding"]["float64_to_e4m3fn"]
    codes = float8.quantize(np.asarray([case["value"]]), np.float32(1.0))
    assert codes_of(codes).tolist() == [case["torch_and_ml_dtypes_go_through_float32"]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_256_codes_decode_to_their_values_and_encode_back(framework, dtype):
    every = np.arange(256, dtype=np.uint8)
    if framework == "torch":
        codes = torch.from_numpy(every).view(getattr(torch, dtype))
    else:
        codes = FRAMEWORKS[framework](every.view(getattr(ml_dtypes, dtype)))
    values = back(float8.dequantize(codes, 1.0))
    expected = np.asarray(
        [math.nan if v == "nan" else float(v) for v in VECTORS["dtypes"][dtype]["decode"]], np.float32
    )
    assert_same_bits(values, expected)
    finite = np.isfinite(expected)
    again = float8.quantize(FRAMEWORKS[framework](expected[finite]), 1.0, dtype)
    assert_same_codes(again, every[finite], dtype)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_a_million_random_values_have_the_same_codes_in_every_framework(dtype, source):
    with np.errstate(over="ignore"):  # NumPy says so where a value becomes infinity
        x = arrays.cast(random(), source)
    expected = codes_of(float8.quantize(x, np.float32(37.25), dtype))
    for convert in FRAMEWORKS.values():
        assert_same_codes(float8.quantize(convert(x), convert(np.asarray([37.25], np.float32)), dtype), expected, dtype)


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_a_compiler_that_fuses_gives_the_same_codes_and_scales(dtype, margin):
    import jax

    def rounded(x):
        scale, scale_inv = saturating_scale(amax(x, 1), float8.largest(dtype), margin=margin)
        codes = float8.quantize(x, scale, dtype)
        return codes, scale, float8.dequantize(codes, scale_inv)

    x = random(seed=4)[16:].clip(-1e30, 1e30)[:999_000].reshape(1000, 999)
    (codes, *floats_), (traced, *traced_floats) = rounded(x), jax.jit(rounded)(x)
    assert_same_codes(traced, codes_of(codes), dtype)
    for actual, expected in zip(traced_floats, floats_, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_narrow_inputs_are_scaled_in_float32(source):
    # A scale below the smallest float16 (6e-8) would be 0 in float16, and every value with it.
    x = np.asarray([1.0, 2.0, 3.0], getattr(ml_dtypes, source) if source == "bfloat16" else source)
    codes = float8.quantize(x, np.float32(2.0**-30), "float8_e5m2")
    assert codes.astype(np.float32).tolist() == [0.0, 0.0, 0.0]
    codes = float8.quantize(x * 0 + 60000, np.float32(448 / 60000), "float8_e4m3fn")
    assert codes.astype(np.float32).tolist() == [448.0, 448.0, 448.0]


@pytest.mark.parametrize("case", VECTORS["qdq"]["cases"], ids=lambda case: case["dtype"])
def test_quantizing_and_dequantizing_gives_the_expected_codes_and_values(case):
    scale, scale_inv = floats([case["scale_multiply"]]), floats([case["scale_inv"]])
    codes = float8.quantize(floats(case["x"]), scale, case["dtype"])
    assert_same_codes(codes, case["codes"], case["dtype"])
    assert_same_bits(float8.dequantize(codes, scale_inv), floats(case["dequant_scale_inv"]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", VECTORS["qdq"]["cases"], ids=lambda case: case["dtype"])
def test_quantizing_and_dequantizing_gives_what_keras_gives(framework, case):
    convert = FRAMEWORKS[framework]
    scale, scale_inv = convert(floats([case["scale_multiply"]])), convert(floats([case["scale_inv"]]))
    codes = float8.quantize(convert(floats(case["x"])), scale, case["dtype"])
    assert_same_codes(codes, case["codes_keras"], case["dtype"])
    assert_same_bits(float8.dequantize(codes, scale_inv), floats(case["dequant_keras"]))


@pytest.mark.parametrize("case", VECTORS["qdq"]["multiply_vs_divide"], ids=lambda case: case["x"])
def test_values_are_multiplied_by_the_scale_and_not_divided_by_its_reciprocal(case):
    codes = float8.quantize(floats([case["x"]]), floats([case["scale_multiply"]]))
    assert codes_of(codes).tolist() == [case["code_multiply"]]
    assert case["code_multiply"] != case["code_divide"]


AXES = {"tensorwise": (0, 1), "rowwise": (1,), "columnwise": (0,)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_current_scales_and_codes_are_those_of_transformer_engine(framework, axis, dtype):
    x = floats(VECTORS["current_scaling"]["x"]).reshape(4, 8)
    case = VECTORS["current_scaling"][f"{dtype}/{axis}"]
    x = FRAMEWORKS[framework](x)
    scale, _ = saturating_scale(amax(x, AXES[axis]), float8.largest(dtype))
    assert_same_bits(back(scale).ravel(), floats(case["te"]["scale_multiply"]))
    assert_same_codes(float8.quantize(x, scale, dtype), case["te"]["codes"], dtype)


def is_subnormal(magnitude):
    return 0 < magnitude < np.finfo(np.float32).smallest_normal


# XLA's CPU backend takes float32 subnormals for zero: the one exception.
EDGES = [
    (framework, float(case["amax"]), case["te"])
    for framework in FRAMEWORKS
    for case in VECTORS["current_scaling"]["scale_edge_cases"]
    if framework != "jax" or not is_subnormal(float(case["amax"]))
]


@pytest.mark.parametrize("framework, magnitude, expected", EDGES, ids=str)
def test_scales_of_extreme_magnitudes_are_those_of_transformer_engine(framework, magnitude, expected):
    scale, _ = saturating_scale(FRAMEWORKS[framework](np.asarray([magnitude], np.float32)), 448.0)
    assert back(scale).tolist() == [np.float32(expected)]


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_a_million_scales_have_the_same_bits_in_every_framework(largest):
    magnitudes = np.abs(random(seed=3))
    # The inverse of the largest float32 is subnormal, which XLA's CPU backend takes for zero.
    magnitudes = magnitudes[(magnitudes == 0) | (magnitudes > 1e-30)]
    expected = saturating_scale(magnitudes, largest)
    for convert in FRAMEWORKS.values():
        for found, wanted in zip(saturating_scale(convert(magnitudes), largest), expected, strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_amax_that_is_not_finite_shows_in_scale_inv(framework):
    magnitudes = FRAMEWORKS[framework](np.asarray([np.nan, np.inf, 0.0, 1.0], np.float32))
    scale, scale_inv = saturating_scale(magnitudes, 448.0)
    assert back(scale).tolist() == [1.0, 1.0, 1.0, 448.0]
    assert np.isnan(back(scale_inv)).tolist() == [True, True, False, False]


def test_a_margin_is_so_many_powers_of_two():
    scale, _ = saturating_scale(np.asarray([3.0], np.float32), 448.0)
    lower, _ = saturating_scale(np.asarray([3.0], np.float32), 448.0, margin=2)
    assert (lower * 4).tolist() == scale.tolist()


def blockwise_matrix():
    i, j = np.mgrid[:256, :384]
    values = ((i * 37 + j * 11 + (i * j) % 13) % 255 - 127) / 64
    return (values * 2.0 ** (((i // 128) * 3 + (j // 128) * 5) % 7 - 3)).astype(np.float32)


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids="{0[0]}x{0[1]}".format)
def test_block_scales_and_codes_are_those_of_transformer_engine(framework, block):
    case = VECTORS["current_scaling"]["blockwise"][f"{block[0]}x{block[1]}/te"]
    x = FRAMEWORKS[framework](blockwise_matrix())
    scale, scale_inv = saturating_scale(block_amax(x, block), 448.0)
    codes = float8.quantize(x, expand_blocks(scale, block, (256, 384)))
    assert sha256(back(scale_inv)) == case["scale_sha256"]
    assert sha256(codes_of(codes)) == case["codes_sha256"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (129, 5), (128, 128), (257, 300)])
def test_blocks_at_the_edges_hold_what_is_left(framework, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = back(block_amax(FRAMEWORKS[framework](x), (128, 128)))
    rows, columns = (-(-length // 128) for length in shape)
    for r in range(rows):
        for c in range(columns):
            assert found[r, c] == np.abs(x[r * 128 : (r + 1) * 128, c * 128 : (c + 1) * 128]).max()
    full = back(expand_blocks(FRAMEWORKS[framework](found), (128, 128), shape))
    assert full.shape == shape
    assert (full >= np.abs(x)).all()


@pytest.mark.parametrize("mode, shape", [("float8/static", (1, 1, 1)), ("float8/weight", (5, 1, 1))])
def test_stored_forms_have_the_shapes_that_they_declare(mode, shape):
    weight = np.random.default_rng(0).standard_normal((5, 3, 2)).astype(np.float32)
    form = stored_form.of(mode)
    parts = form.encode(weight)
    assert {name: (part.shape, part.dtype.name) for name, part in parts.items()} == form.parts(weight.shape)
    assert parts["scale"].shape == shape


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_stored_weight_comes_back_within_half_a_step_of_float8(framework):
    weight = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    parts = float8.encode_per_channel(FRAMEWORKS[framework](weight))
    decoded = back(float8.decode(parts))
    # Three bits of mantissa: at most 1/16 of a normal value; half a subnormal step of the channel below that.
    step = np.abs(weight).max(1, keepdims=True) / 448 * 2.0**-9
    assert (np.abs(decoded - weight) <= np.maximum(np.abs(weight) / 16, step / 2) * (1 + 1e-6)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("encode", [float8.encode_per_tensor, float8.encode_per_channel])
def test_a_weight_that_is_not_finite_is_refused(encode, value):
    with pytest.raises(WeightError, match=r"Weight holds NaN or infinity\. Got num_not_finite=1, shape=\(2, 2\)"):
        encode(np.asarray([[1.0, value], [0.0, 2.0]], np.float32))
