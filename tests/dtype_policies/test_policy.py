"""`DTypePolicy` as a value."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.dtype_policies import (
    DTypePolicy,
    FloatDTypePolicy,
    QuantizedFloat8DTypePolicy,
    asked,
    dtypes,
    get,
    keep,
)
from narrowcast.errors import PolicyError, PolicyTypeError

NAMES = [*dtypes.ALL, "mixed_float16", "mixed_bfloat16"]
POLICIES = [
    get("mixed_float16"),
    FloatDTypePolicy("int32"),
    get("int8_from_bfloat16"),
    get("int8/weight_from_float32"),
    QuantizedFloat8DTypePolicy("float32", amax_history_length=32, margin=1),
    get("float8/block_from_mixed_bfloat16"),
    get("int4/128_from_float32"),
    get("gptq/3/-1_from_float32"),
    get("awq/4/64_from_float16"),
    get("mxfp6/weight_from_bfloat16"),
    get("nvfp4_from_bfloat16"),
    asked("int8"),
    keep,
]


@pytest.mark.parametrize("name", NAMES)
def test_name_makes_an_equal_policy(name):
    assert get(DTypePolicy(name).name) == DTypePolicy(name)


@pytest.mark.parametrize("name, compute_dtype", [("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")])
def test_mixed_policy_stores_in_float32(name, compute_dtype):
    policy = DTypePolicy(name)
    assert (policy.compute_dtype, policy.variable_dtype) == (compute_dtype, "float32")


@pytest.mark.parametrize("name", list(dtypes.ALL))
def test_dtype_name_computes_and_stores_in_that_dtype(name):  # P-09, H-04, H-12
    policy = DTypePolicy(name)
    assert type(policy) is DTypePolicy
    assert (policy.compute_dtype, policy.variable_dtype, policy.quantization_mode) == (name, name, None)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_pickle_keeps_everything(policy):  # P-02, H-11
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert (repr(again), hash(again), again.get_config()) == (repr(policy), hash(policy), policy.get_config())


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_the_same_value(policy, copied):  # P-02
    assert copied(policy) == policy
    assert copied([policy]) == [policy]


def test_pickle_is_read_in_another_process():
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
    policy = QuantizedFloat8DTypePolicy("bfloat16", amax_history_length=7)
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(policy), capture_output=True, check=True)
    assert done.stdout.decode().strip() == repr(policy)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_config_makes_an_equal_policy(policy):
    config = policy.get_config()
    before = copy.deepcopy(config)
    assert type(policy).from_config(config) == policy
    assert config == before


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_cannot_be_changed(policy):
    with pytest.raises(AttributeError, match="is a value and has no attribute that can be set"):
        policy.name = "float16"
    with pytest.raises(AttributeError):
        policy._name = "float16"
    with pytest.raises(AttributeError):
        del policy._name


def test_no_two_policies_are_equal_and_equal_ones_hash_equal():  # P-01
    assert len(set(POLICIES)) == len(POLICIES)
    assert dict.fromkeys(POLICIES, True)[pickle.loads(pickle.dumps(POLICIES[0]))]


def test_policy_is_the_key_of_a_cache():  # P-01
    calls = []
    cached = lru_cache(calls.append)
    cached(get("int8_from_float32"))
    cached(get("int8_from_float32"))
    assert len(calls) == 1


@pytest.mark.parametrize("other", ["float32", None, 5, [], DTypePolicy], ids=repr)
def test_policy_equals_nothing_but_policies(other):
    assert DTypePolicy("float32") != other


def test_class_of_old_name_makes_equal_policies():
    assert FloatDTypePolicy("float32") == DTypePolicy("float32")
    assert hash(FloatDTypePolicy("float32")) == hash(DTypePolicy("float32"))
    assert repr(FloatDTypePolicy("float32")) == '<DTypePolicy "float32">'


def test_subclass_of_a_user_is_another_value():
    class Mine(DTypePolicy):
        pass

    assert Mine("float32") != DTypePolicy("float32")
    assert repr(Mine("float32")) == '<Mine "float32">'


def test_unknown_name_suggests_the_nearest():
    message = r"Policy name is unknown. Got name='mixed_bfloat61'. Expected .*; did you mean 'mixed_bfloat16'\?"
    with pytest.raises(PolicyError, match=message):
        DTypePolicy("mixed_bfloat61")


def test_name_of_a_quantized_policy_says_who_makes_it():
    with pytest.raises(PolicyError, match="Quantized policies are made by `get`"):
        DTypePolicy("int8_from_float32")


@pytest.mark.parametrize(
    "name", [5, 1.5, b"float32", ["float32"], keep, DTypePolicy("float32"), DTypePolicy("mixed_float16")], ids=repr
)
def test_what_is_no_name_is_a_type_error(name):
    with pytest.raises(PolicyTypeError, match=r"Policy name is not text. Got name="):
        DTypePolicy(name)


@given(st.text())
def test_any_text_is_a_policy_with_this_name_or_an_error(text):
    try:
        assert DTypePolicy(text).name == text
    except PolicyError as error:
        assert error.got == {"name": text}  # noqa: PT017 - both ways are right


def test_convert_input_casts_to_no_unknown_dtype():
    with pytest.raises(PolicyError, match="Dtype is unknown"):
        DTypePolicy("float32").convert_input(1.0, True, "float61")
