"""The pure state of delayed scaling: Transformer Engine's fused rule, except where this one differs on purpose."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from narrowcast.numerics import float8
from narrowcast.numerics.delayed_scaling import advance, in_order, merge, resize, scale_in_use
from narrowcast.numerics.scaling import LARGEST_FLOAT32
from tests.numerics.arrays import FRAMEWORKS, back

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "float8_vectors.json").read_text("utf-8"))["delayed_scaling"]
FUSED = [case for case in VECTORS if case["algorithm"] == "transformer_engine_fused"]


def name(case):
    return f"{case['sequence']}-{case['dtype']}-{case['history_len']}-{case['margin']}-{case['amax_compute_algo']}"


def start(convert, length, roles=1):
    zeros = np.zeros(roles, np.float32)
    return convert(zeros), convert(np.zeros((roles, length), np.float32)), indices(convert, [0] * roles)


def indices(convert, values):
    # PyTorch gathers by int64 only; JAX has no int64 unless told.
    return convert(np.asarray(values, np.int64 if convert is FRAMEWORKS["torch"] else np.int32))


def run(convert, amaxes, length, **options):
    """The scale and the ordered history after each amax."""
    state = start(convert, length)
    for amax in amaxes:
        pending = merge(convert(np.zeros(1, np.float32)), convert(np.asarray([amax], np.float32)))
        state = advance(*state, pending, **options)
        yield float(back(state[0])[0]), back(in_order(*state[1:]))[0].tolist()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", [case for case in FUSED if case["sequence"] == "plain"], ids=name)
def test_scales_and_histories_are_those_of_transformer_engine(framework, case):
    options = {
        "largest": float8.largest(case["dtype"]),
        "margin": case["margin"],
        "use_max": case["amax_compute_algo"] == "max",
    }
    length = case["history_len"]
    steps = run(FRAMEWORKS[framework], [float(step["amax"]) for step in case["steps"]], length, **options)
    for (scale, history), step in zip(steps, case["steps"], strict=True):
        assert scale == np.float32(step["scale_next"])
        # Their first entry is the pending one, cleared by the step; the entry that it pushes out is one older.
        assert history[1:] == [np.float32(a) for a in step["history"][1:]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", [case for case in FUSED if case["sequence"] == "nasty"], ids=name)
def test_without_what_is_not_finite_the_nasty_sequence_is_that_of_transformer_engine(framework, case):
    # On purpose: an amax that is not finite is as if the step had not been, while theirs enters the history.
    options = {
        "largest": float8.largest(case["dtype"]),
        "margin": case["margin"],
        "use_max": case["amax_compute_algo"] == "max",
    }
    amaxes = [float(step["amax"]) for step in case["steps"]]
    finite = [amax for amax in amaxes if math.isfinite(amax)]
    length = case["history_len"]
    with_all = dict(enumerate(run(FRAMEWORKS[framework], amaxes, length, **options)))
    without = list(run(FRAMEWORKS[framework], finite, length, **options))
    assert [with_all[i] for i, amax in enumerate(amaxes) if math.isfinite(amax)] == without
    assert all(0 < scale <= LARGEST_FLOAT32 for scale, _ in with_all.values())


def same_until_not_finite(case):
    for index, step in enumerate(case["steps"]):
        if not math.isfinite(float(step["amax"])):
            return index
    return len(case["steps"])


@pytest.mark.parametrize("case", [case for case in FUSED if case["sequence"] == "nasty"], ids=name)
def test_rows_that_differ_from_transformer_engine_are_those_after_a_value_that_is_not_finite(case):
    options = {
        "largest": float8.largest(case["dtype"]),
        "margin": case["margin"],
        "use_max": case["amax_compute_algo"] == "max",
    }
    ours = [s for s, _ in run(lambda x: x, [float(s["amax"]) for s in case["steps"]], case["history_len"], **options)]
    theirs = [np.float32(step["scale_next"]) for step in case["steps"]]
    first = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    assert first is None or first >= same_until_not_finite(case)
    # At the end the window holds finite values only, and both agree again.
    assert ours[-1] == theirs[-1]


def test_the_first_scale_comes_from_the_data_and_not_from_one():
    # On purpose: all reference implementations multiply by 1 until a history exists.
    stored = np.asarray([0.0, 8.0], np.float32)
    assert scale_in_use(stored, np.asarray([4.0, 4.0], np.float32), 448.0).tolist() == [112.0, 8.0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_role_without_pending_amax_keeps_scale_history_and_index(framework):
    convert = FRAMEWORKS[framework]
    state = convert(np.asarray([3.0, 5.0], np.float32)), convert(np.ones((2, 3), np.float32)), indices(convert, [1, 2])
    scale, history, index = advance(*state, convert(np.asarray([0.0, 7.0], np.float32)), 448.0)
    assert back(scale).tolist() == [3.0, 64.0]
    assert back(history).tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 7.0]]
    assert back(index).tolist() == [1, 0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("amax", [np.nan, np.inf, 0.0])
def test_what_is_not_finite_or_zero_never_enters_and_never_freezes(framework, amax):
    states = list(run(FRAMEWORKS[framework], [2.0, amax, 4.0], 4, largest=448.0))
    assert states[1] == states[0]
    assert states[2] == (112.0, [0.0, 0.0, 2.0, 4.0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_merging_is_idempotent_and_takes_the_larger(framework):
    convert = FRAMEWORKS[framework]
    pending = convert(np.zeros(1, np.float32))
    for amax in (5.0, 1.0, 5.0, np.nan, 1.0):
        pending = merge(pending, convert(np.asarray([amax], np.float32)))
    assert back(pending).tolist() == [5.0]


def test_a_history_of_length_one_follows_the_last_step():
    assert [scale for scale, _ in run(lambda x: x, [4.0, 1.0, 2.0], 1, largest=448.0)] == [112.0, 448.0, 224.0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "length, expected", [(2, [6.0, 7.0]), (4, [4.0, 5.0, 6.0, 7.0]), (6, [0.0, 0.0, 4.0, 5.0, 6.0, 7.0])]
)
def test_resizing_keeps_the_newest_entries(framework, length, expected):
    convert = FRAMEWORKS[framework]
    state = start(convert, 4)
    for amax in (3.0, 4.0, 5.0, 6.0, 7.0):
        state = advance(*state, convert(np.asarray([amax], np.float32)), 448.0)
    history, index = resize(state[1], state[2], length)
    assert back(in_order(history, index))[0].tolist() == expected
    _, history, index = advance(state[0], history, index, convert(np.asarray([8.0], np.float32)), 448.0)
    assert back(in_order(history, index))[0].tolist() == [*expected[1:], 8.0]
