from __future__ import annotations

import dataclasses
import json
import math

import pytest

from narrowcast.errors import PathError
from narrowcast.observe.records import Observation, Point, Summary

GRADIENT = Observation(
    path="blocks/0/up",
    kind="linear",
    policy="float8_from_mixed_bfloat16",
    tensor="gradient",
    dtype="float8_e5m2",
    num_steps=2,
    num_elements=8192,
    num_nonfinite_steps=0,
    amax=0.00586,
    zeros=0.25,
    subnormal=0.0625,
    underflow=0.00002,
    saturation=0.0,
    sqnr_db=25.64,
    histogram=((-3, 0.5), (-2, 0.25)),
    history=(Point(0, 0.00586, 0.0, 0.0, 25.5, 9.8e6), Point(7, 0.004, 0.00004, 0.0, math.inf, 1.4e7)),
)
INPUT = dataclasses.replace(
    GRADIENT,
    tensor="input",
    dtype="bfloat16",
    subnormal=None,
    underflow=None,
    saturation=None,
    sqnr_db=None,
    history=(),
)
EXACT = dataclasses.replace(GRADIENT, path="", tensor="weight", sqnr_db=math.inf, num_nonfinite_steps=1)
SUMMARY = Summary("Net", 10, 2, 0.093, (INPUT, GRADIENT, EXACT))


def test_table_has_a_row_for_each_tensor_and_names_each_site_once() -> None:
    assert SUMMARY.table().rows == (
        ("blocks/0/up", "input", "bfloat16", "0.00586", "25.0%", "–", "–", "–", "–"),
        ("", "gradient", "float8_e5m2", "0.00586", "25.0%", "2e-05", "0", "25.6 dB", "1.4e+07"),
        ("(root)", "weight", "float8_e5m2", "0.00586", "25.0%", "2e-05", "0", "exact", "1.4e+07"),
    )


def test_text_says_how_much_was_recorded_what_it_took_and_what_was_not_finite() -> None:
    lines = str(SUMMARY).splitlines()
    assert lines[0] == "Net: 2 of 10 steps recorded"
    assert lines[-2:] == [
        "(root), weight: NaN or infinity in 1 of 2 steps",
        "recording took 9.3% of the steps' time",
    ]


def test_many_broken_tensors_are_counted_and_not_all_listed() -> None:
    broken = tuple(dataclasses.replace(EXACT, path=f"layer/{i}") for i in range(30))
    assert "NaN or infinity in 20 more tensors" in str(Summary("Net", 1, 1, 0.0, broken))


def test_worst_comes_first_and_what_has_no_error_is_left_out() -> None:
    assert SUMMARY.worst() == (GRADIENT, EXACT)
    assert SUMMARY.worst(1) == (GRADIENT,)


def test_observation_is_found_by_its_site_and_its_tensor() -> None:
    assert SUMMARY["blocks/0/up", "gradient"] is GRADIENT
    with pytest.raises(PathError, match=r"Nothing was observed there.*did you mean 'blocks/0/up, gradient'"):
        SUMMARY["blocks/0/up", "grad"]
    with pytest.raises(PathError, match="one of input, weight, output, gradient"):
        SUMMARY["nowhere"]  # type: ignore[index]


def test_json_is_plain_and_has_no_infinity() -> None:
    data = SUMMARY.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    gradient, exact = data["observations"][1:]
    assert gradient["histogram"] == [[-3, 0.5], [-2, 0.25]]
    assert gradient["history"][0] == {
        "step": 0,
        "amax": 0.00586,
        "underflow": 0.0,
        "saturation": 0.0,
        "sqnr_db": 25.5,
        "scale": 9.8e6,
    }
    assert gradient["history"][1]["sqnr_db"] is None
    assert exact["sqnr_db"] is None


def test_records_are_frozen_and_equal_by_value() -> None:
    assert dataclasses.replace(GRADIENT) == GRADIENT
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRADIENT.amax = 1.0  # type: ignore[misc]
