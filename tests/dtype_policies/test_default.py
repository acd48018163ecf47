"""The global policy: one default for the process, scopes for a block of code."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from narrowcast.dtype_policies import (
    DTypePolicy,
    DTypePolicyMap,
    dtype_policy,
    get,
    keep,
    policy_scope,
    set_dtype_policy,
)
from narrowcast.errors import PolicyError


@pytest.fixture(autouse=True)
def _default_restored():
    yield
    set_dtype_policy("float32")


def in_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_default_is_float32():
    assert dtype_policy() == DTypePolicy("float32")


def test_default_is_seen_by_every_thread():  # G-01
    set_dtype_policy("mixed_bfloat16")
    assert in_thread(dtype_policy).name == "mixed_bfloat16"
    in_thread(lambda: set_dtype_policy("float16"))
    assert dtype_policy().name == "float16"


def test_scope_is_seen_in_its_thread_only():  # G-01
    with policy_scope("float16"):
        assert in_thread(dtype_policy).name == "float32"
        assert dtype_policy().name == "float16"


def test_scopes_of_two_threads_do_not_meet():
    entered, left = threading.Barrier(2), threading.Barrier(2)

    def work(name):
        with policy_scope(name):
            entered.wait(10)
            seen = dtype_policy().name
            left.wait(10)
        return seen, dtype_policy().name

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(work, ["float16", "float64"]))
    assert seen == [("float16", "float32"), ("float64", "float32")]


def test_one_scope_object_serves_two_threads():
    scope = policy_scope("float16")
    entered = threading.Barrier(2)

    def work():
        with scope:
            entered.wait(10)
            return dtype_policy().name

    with ThreadPoolExecutor(2) as pool:
        assert [future.result() for future in [pool.submit(work), pool.submit(work)]] == ["float16"] * 2
    assert dtype_policy().name == "float32"


def test_scope_is_seen_in_its_task_only():
    async def work(name):
        with policy_scope(name):
            await asyncio.sleep(0)
            return dtype_policy().name

    async def both():
        return await asyncio.gather(work("float16"), work("float64"))

    assert asyncio.run(both()) == ["float16", "float64"]


def test_scope_ends_on_an_error():  # G-03
    with pytest.raises(RuntimeError, match="inside"), policy_scope("float16"):
        raise RuntimeError("inside")
    assert dtype_policy().name == "float32"


def test_scopes_nest():
    with policy_scope("float16"):
        with policy_scope("float64"):
            assert dtype_policy().name == "float64"
        assert dtype_policy().name == "float16"
    assert dtype_policy().name == "float32"


def test_scope_can_be_entered_again_while_in_force():
    scope = policy_scope("float16")
    with scope:
        with scope:
            assert dtype_policy().name == "float16"
        assert dtype_policy().name == "float16"
    assert dtype_policy().name == "float32"


def test_default_set_inside_a_scope_shows_when_the_scope_ends():
    with policy_scope("float16"):
        set_dtype_policy("float64")
        assert dtype_policy().name == "float16"
    assert dtype_policy().name == "float64"


def test_scope_gives_its_policy():
    with policy_scope("mixed_float16") as policy:
        assert policy == get("mixed_float16")


def test_reading_changes_nothing():  # G-04
    before = dtype_policy()
    assert dtype_policy() is before


@pytest.mark.parametrize(
    "value",
    [
        "bfloat16",
        torch.bfloat16,
        DTypePolicy("bfloat16"),
        {"class_name": "DTypePolicy", "config": {"name": "bfloat16"}},
    ],
    ids=repr,
)
def test_setter_and_getter_take_the_same(value):  # P-13
    set_dtype_policy(value)
    assert dtype_policy() == get(value)


def test_quantized_policy_is_a_global_policy():  # G-05, G-06
    set_dtype_policy("int8_from_mixed_bfloat16")
    assert get(None) == get("int8_from_mixed_bfloat16")
    assert DTypePolicy() == get("mixed_bfloat16")


@pytest.mark.parametrize("value", [DTypePolicyMap("float32"), keep, "keep", "int8_from_keep", None], ids=repr)
@pytest.mark.parametrize("setter", [set_dtype_policy, policy_scope])
def test_policy_that_answers_for_one_model_only_is_refused(setter, value):  # M-13
    with pytest.raises(PolicyError, match=r"Policy cannot be global|Global policy is not given"):
        setter(value)
    assert dtype_policy().name == "float32"


@pytest.mark.parametrize("value", ["flot32", 5, [], "gptq/4/128"], ids=repr)
def test_what_is_no_policy_is_refused_and_the_default_stays(value):
    with pytest.raises(PolicyError):
        set_dtype_policy(value)
    assert dtype_policy().name == "float32"
