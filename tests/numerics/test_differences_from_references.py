"""Every row of the reference vectors for float8 in which a library differs from narrowcast on purpose, with the reason.

What is not listed is equal: each test works out all rows of its kind that differ and compares them with its list.
"""

from __future__ import annotations

import numpy as np
import pytest

from narrowcast.numerics import float8
from narrowcast.numerics.scaling import amax, block_amax, expand_blocks, saturating_scale
from tests.numerics.test_delayed_scaling import VECTORS as DELAYED
from tests.numerics.test_delayed_scaling import name, run
from tests.numerics.test_float8 import AXES, VECTORS, blockwise_matrix, codes_of, floats, sha256

CURRENT = VECTORS["current_scaling"]

LAGS = "uses the amaxes up to the step before the last, and a scale of 1 until there are some"
ROUNDS = "multiplies by a rounded reciprocal: a unit in the last place off"
STAYS = "an infinity in the window freezes the scale"
STAYS_AND_FORGETS = f"{STAYS}; multiplies by the margin last, so that tiny amaxes overflow at another place"
STORES = f"{LAGS}; an amax of 0, NaN or infinity is stored"

DELAYED_DIFFERENCES = {
    ("transformer_engine_python", "plain-float8_e4m3fn-3-1-max"): ([6], ROUNDS),
    ("transformer_engine_python", "plain-float8_e5m2-4-0-most_recent"): ([6, 9], ROUNDS),
    ("transformer_engine_python", "plain-float8_e4m3fn-1-0-max"): ([6, 9], ROUNDS),
    ("transformer_engine_fused", "nasty-float8_e4m3fn-4-0-max"): ([9], STAYS),
    ("transformer_engine_python", "nasty-float8_e4m3fn-4-0-max"): ([9], STAYS),
    ("transformer_engine_fused", "nasty-float8_e4m3fn-3-1-max"): ([8], STAYS),
    ("transformer_engine_python", "nasty-float8_e4m3fn-3-1-max"): ([8, 12, 13], STAYS_AND_FORGETS),
    ("keras", "plain-float8_e4m3fn-4-0-max"): ([0, 1, 3, 7], LAGS),
    ("flax", "plain-float8_e4m3fn-4-0-max"): ([0, 1, 3, 7], LAGS),
    ("keras", "nasty-float8_e4m3fn-4-0-max"): ([0, 2, 9, 10, 13, 14], STORES),
    ("flax", "nasty-float8_e4m3fn-4-0-max"): ([0, 2, 9, 10, 13, 14], STORES),
}
"""By algorithm and case: the steps whose next scale differs."""


@pytest.mark.parametrize("case", DELAYED, ids=lambda case: f"{case['algorithm']}-{name(case)}")
def test_next_scales_differ_in_the_listed_steps_only(case):
    ours = run(
        np.asarray,
        [float(step["amax"]) for step in case["steps"]],
        case["history_len"],
        largest=float8.largest(case["dtype"]),
        margin=case["margin"],
        use_max=case["amax_compute_algo"] == "max",
    )
    different = []
    for index, ((scale, _), step) in enumerate(zip(ours, case["steps"], strict=True)):
        mine = np.float32(scale) if case["scale_convention"] == "multiply" else np.float32(1.0) / np.float32(scale)
        if mine != np.float32(step["scale_next"]):
            different.append(index)
    expected, _ = DELAYED_DIFFERENCES.get((case["algorithm"], name(case)), ([], "equal"))
    assert different == expected


def test_first_scales_in_use_differ_everywhere():
    # Theirs is 1, whatever the data; here it is that of the data.
    assert {step["scale_used"] for case in DELAYED for step in case["steps"][:1]} == {1}


POWER_OF_TWO = "rounds scales down to powers of two, which costs up to a bit"
FLOOR = "takes no amax below 1e-12, which costs small tensors their digits"

SCALE_DIFFERENCES = {
    "torchao": ([0.0, 1e-45, 1e-38, 1e-36, 1.3e-36, 1e-13, np.inf], f"{FLOOR}; infinity gives 0"),
    "te_pow2": ([1e-45, 1e-38, 1e-36, 1.3e-36, 1e-13, 1e-12, 1e-4, 1.0, 449.0, 3e38], POWER_OF_TWO),
    "te": ([], "equal"),
}
"""By library: the amaxes whose scale differs."""


@pytest.mark.parametrize("library", SCALE_DIFFERENCES)
def test_scales_of_extreme_magnitudes_differ_for_the_listed_only(library):
    different = []
    for case in CURRENT["scale_edge_cases"]:
        magnitude = np.float32(case["amax"])
        if saturating_scale(magnitude.reshape(1), 448.0)[0].item() != np.float32(case[library]):
            different.append(magnitude)
    assert different == [np.float32(magnitude) for magnitude in SCALE_DIFFERENCES[library][0]]


def test_deepgemm_takes_no_amax_below_a_ten_thousandth():
    # Its scales are ours, by which it divides, for every finite amax above; gradients below would lose their digits.
    for case in CURRENT["scale_edge_cases"]:
        magnitude = np.float32(case["amax"])
        inverse = saturating_scale(magnitude.reshape(1), 448.0)[1].item()
        is_equal = np.isclose(inverse, float(case["deepgemm_scale_divide"]), rtol=2.0**-22)  # rounded once or twice
        assert is_equal == (1e-4 <= magnitude < np.inf)


CODE_DIFFERENCES = {
    "te_pow2": POWER_OF_TWO,
    "torchao_pow2": POWER_OF_TWO,
    "torchao": "",
    "te": "",
}
"""By library: why codes differ; where there is no reason they are equal."""


@pytest.mark.parametrize("library", CODE_DIFFERENCES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_by_scales_of_the_data_differ_for_powers_of_two_only(dtype, axis, library):
    x = floats(CURRENT["x"]).reshape(4, 8)
    scale, _ = saturating_scale(amax(x, AXES[axis]), float8.largest(dtype))
    codes = codes_of(float8.quantize(x, scale, dtype)).ravel()
    expected = np.asarray(CURRENT[f"{dtype}/{axis}"][library]["codes"], np.uint8).ravel()
    assert np.array_equal(codes, expected) is not bool(CODE_DIFFERENCES[library])


BLOCK_DIFFERENCES = {
    "te": "",
    "torchao": "",
    "te_pow2": POWER_OF_TWO,
    "deepgemm_ue8m0": POWER_OF_TWO,
    "deepgemm": "",
}


@pytest.mark.parametrize("library", BLOCK_DIFFERENCES)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids="{0[0]}x{0[1]}".format)
def test_codes_by_blocks_differ_as_listed(block, library):
    x = blockwise_matrix()
    scale, _ = saturating_scale(block_amax(x, block), 448.0)
    codes = float8.quantize(x, expand_blocks(scale, block, x.shape))
    case = CURRENT["blockwise"][f"{block[0]}x{block[1]}/{library}"]
    assert (sha256(codes_of(codes)) == case["codes_sha256"]) is not bool(BLOCK_DIFFERENCES[library])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_codes_of_casts_that_do_not_saturate_differ_beyond_the_largest_value_only(dtype):
    case = VECTORS["casts"][dtype]
    x, theirs = floats(case["input_f32"]), np.asarray(case["nonsaturating"], np.uint8).ravel()
    different = codes_of(float8.quantize(x, 1.0, dtype)).ravel() != theirs
    # Codes of NaN differ by their sign only.
    assert (np.abs(x[different & ~np.isnan(x)]) > float8.largest(dtype)).all()
    assert different.any()
