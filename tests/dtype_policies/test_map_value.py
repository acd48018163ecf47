"""A map as a policy and as a value: its attributes, equality, copies, config."""

from __future__ import annotations

import copy
import pickle

import pytest

from narrowcast.dtype_policies import (
    DTypePolicy,
    DTypePolicyMap,
    deserialize,
    get,
    policy_scope,
    registry,
    serialize,
)
from narrowcast.errors import PolicyTypeError
from tests.dtype_policies.test_map import example

FLOAT16, BFLOAT16, FLOAT32 = get("float16"), get("bfloat16"), get("float32")


def test_map_as_a_policy_is_its_default():
    policies = DTypePolicyMap("int8_from_mixed_bfloat16")
    assert isinstance(policies, DTypePolicy)
    assert policies.name == "map_int8_from_mixed_bfloat16"
    assert (policies.compute_dtype, policies.variable_dtype) == ("bfloat16", "float32")
    assert (policies.quantization_mode, policies.source) == ("int8", get("mixed_bfloat16"))


def test_map_says_whether_a_default_was_given():
    assert DTypePolicyMap("float32").has_default
    assert not DTypePolicyMap().has_default


def test_empty_map_is_true():  # M-11
    assert DTypePolicyMap()
    assert DTypePolicyMap("float64")


def test_maps_are_equal_by_default_rules_and_optional_keys():  # M-03
    rules = {"a": "int8", "b": "keep"}
    assert DTypePolicyMap("float32", rules) == DTypePolicyMap("float32", dict(reversed(rules.items())))
    others = [
        DTypePolicyMap(None, rules),
        DTypePolicyMap("float16", rules),
        DTypePolicyMap("float32", {"a": "int8"}),
        DTypePolicyMap("float32", rules, optional=["a"]),
        rules,
        get("float32"),
    ]
    assert all(DTypePolicyMap("float32", rules) != other for other in others)


def test_map_without_default_does_not_equal_one_with_the_global_policy():
    assert DTypePolicyMap() != DTypePolicyMap(FLOAT32)


def test_map_has_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(DTypePolicyMap())


def test_map_has_no_mode():
    with pytest.raises(PolicyTypeError, match="Map has no mode of its own"):
        registry.mode_of(DTypePolicyMap())


def test_attributes_of_a_map_cannot_be_set():
    with pytest.raises(AttributeError):
        example().default_policy = "float16"


FULL = DTypePolicyMap(
    "mixed_bfloat16",
    {
        "a": "int8",
        "b": {"class_name": "QuantizedFloat8DTypePolicy", "config": {"name": "float32", "amax_history_length": 7}},
        "c/.*": "keep",
        "class_name": "gptq/4/128_from_float32",
        "config": DTypePolicy("int8"),
    },
    optional=["c/.*"],
)


@pytest.mark.parametrize("policies", [FULL, DTypePolicyMap(), example()], ids=repr)
@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda policies: pickle.loads(pickle.dumps(policies)),
        lambda policies: DTypePolicyMap.from_config(policies.get_config()),
        lambda policies: deserialize(serialize(policies)),
    ],
    ids=["copy", "deepcopy", "pickle", "config", "serialize"],
)
def test_copy_of_any_kind_is_equal_and_separate(policies, again):
    before = policies.get_config()
    made = again(policies)
    assert made == policies
    assert list(made) == list(policies)
    made["new"] = "float16"
    made.match("new")
    assert policies.get_config() == before


def test_config_is_read_without_being_changed():  # M-01
    config = FULL.get_config()
    before = copy.deepcopy(config)
    DTypePolicyMap.from_config(config)
    assert config == before


def test_config_of_a_map_changes_no_policy():  # M-01
    policy = get("int8_from_mixed_bfloat16")
    policies = DTypePolicyMap(None, {"a": policy, "b": FLOAT16})
    before = policy.get_config(), FLOAT16.get_config()
    policies.get_config()
    assert (policy.get_config(), FLOAT16.get_config()) == before
    assert policies["a"] is policy


def test_rules_without_a_default_survive_another_global_policy():  # M-02
    rules = {"a": "bfloat16", "b": "int8_from_mixed_bfloat16", "c": "gptq/4/128_from_float16"}
    config = DTypePolicyMap(None, rules).get_config()
    with policy_scope("float64"):
        again = DTypePolicyMap.from_config(config)
    assert {key: policy.name for key, policy in again.items()} == rules
    assert config["default_policy"] is None


def test_repr_shows_default_and_rules():
    assert repr(DTypePolicyMap(None, {"a": "int8"})) == (
        """<DTypePolicyMap default_policy=None, policy_map={'a': <QuantizedDTypePolicy "int8_from_keep">}>"""
    )
