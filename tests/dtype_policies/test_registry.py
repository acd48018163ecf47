"""Reading policies: `get`, `asked`, `serialize`, `deserialize`."""

from __future__ import annotations

import copy
import json

import numpy
import pytest
import torch

from narrowcast.dtype_policies import (
    DTypePolicy,
    DTypePolicyMap,
    Int4DTypePolicy,
    KeepPolicy,
    QuantizedDTypePolicy,
    asked,
    deserialize,
    get,
    keep,
    policy_scope,
    registry,
    serialize,
)
from narrowcast.dtype_policies.names import Grammar
from narrowcast.errors import PolicyError, PolicyTypeError


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", DTypePolicy("bfloat16")], ids=repr)
def test_get_takes_every_form_of_a_dtype(dtype):
    assert get(dtype) == DTypePolicy("bfloat16")


def test_get_of_a_policy_is_that_policy():
    policy = QuantizedDTypePolicy("int8", "float32")
    assert get(policy) is policy


def test_get_of_nothing_is_the_global_policy():
    with policy_scope("int8_from_float32") as policy:
        assert get(None) is policy


def test_name_of_a_mode_is_a_dtype_for_a_layer_and_a_mode_for_a_map():  # P-09
    assert get("int8") == DTypePolicy("int8")
    assert asked("int8") == QuantizedDTypePolicy("int8", "keep")


def test_dtype_object_is_a_dtype_for_both():
    assert get(torch.int8) == asked(torch.int8) == asked(numpy.int8) == DTypePolicy("int8")


@pytest.mark.parametrize("name", ["float8", "gptq/4/128", "int8/weight", "mxfp8"])
def test_mode_without_source_is_refused_for_a_layer(name):
    with pytest.raises(PolicyError, match=f"did you mean '{name}_from_mixed_bfloat16'"):
        get(name)


def test_keep_has_one_name_and_one_object():
    assert get("keep") is asked("keep") is deserialize("keep") is keep is KeepPolicy()


def test_asked_of_an_unknown_name_lists_modes_and_suggests_the_nearest():
    with pytest.raises(
        PolicyError, match=r"Policy is unknown. Got policy='int-8'. Expected a mode .*did you mean 'int8'\?"
    ):
        asked("int-8")


@pytest.mark.parametrize("value", [5, 1.5, b"float32", [], object], ids=repr)
def test_what_is_no_policy_is_refused(value):
    with pytest.raises(PolicyError, match=r"Policy cannot be read. Got identifier="):
        get(value)


def test_plain_policies_serialize_to_their_name():  # P-14, H-05
    assert serialize(DTypePolicy("mixed_float16")) == "mixed_float16"
    assert serialize(keep) == "keep"


@pytest.mark.parametrize(
    "policy",
    [
        *(
            get(name)
            for name in ("float32", "int8", "keep", "int8_from_float32", "int4/32_from_keep", "nvfp4_from_float16")
        ),
        registry.make("float8", "float32", amax_history_length=3),
        DTypePolicyMap("keep", {"a/.*": "int8"}, optional=["a/.*"]),
    ],
    ids=repr,
)
def test_serialized_policy_survives_json(policy):
    assert deserialize(json.loads(json.dumps(serialize(policy)))) == policy


def test_string_object_and_config_mean_the_same():  # P-14
    spellings = [
        "mixed_float16",
        DTypePolicy("mixed_float16"),
        {"class_name": "DTypePolicy", "config": {"name": "mixed_float16"}},
    ]
    assert {get(spelling) for spelling in spellings} == {DTypePolicy("mixed_float16")}


@pytest.mark.parametrize(
    "config, policy",
    [
        (
            {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float16"}, "registered_name": None},
            "float16",
        ),
        ({"class_name": "FloatDTypePolicy", "config": {"name": "float16"}}, "float16"),
        ({"class_name": "Policy", "config": {"name": "mixed_float16"}}, "mixed_float16"),  # S-11, H-13
        ({"class_name": "DTypePolicy", "config": {"name": None}}, "float64"),  # what M-01 wrote: the global policy
        ({"class_name": "QuantizedDTypePolicy", "config": {"mode": "int8", "source_name": None}}, "int8_from_float64"),
        (
            {"class_name": "QuantizedDTypePolicy", "config": {"mode": "float8", "source_name": "float16"}},
            "float8_from_float16",
        ),
        (
            {"class_name": "QuantizedDTypePolicy", "config": {"mode": "int4", "source_name": "float16"}},
            "int4/-1_from_float16",
        ),
        (
            {
                "class_name": "QuantizedFloat8DTypePolicy",
                "config": {"name": "float8_from_float16", "amax_history_length": 1024},
            },
            "float8_from_float16",
        ),
    ],
    ids=repr,
)
def test_configs_that_keras_wrote_are_read(config, policy):
    before = copy.deepcopy(config)
    with policy_scope("float64"):
        assert deserialize(config) == get(policy)
    assert config == before


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"config": {"name": "float32"}},
        {"class_name": 5, "config": {}},
        {"class_name": "DTypePolicy", "config": "float32"},
        {"name": "float32"},
        [],
        None,
        5,
    ],
    ids=repr,
)
def test_config_of_another_shape_is_refused(config):
    with pytest.raises(PolicyError, match=r"Policy config cannot be read. Got config="):
        deserialize(config)


@pytest.mark.parametrize("class_name", ["Dense", "dict", "DTypePolicyMapp", "Mode"])
def test_class_that_is_no_policy_is_refused(class_name):  # P-12
    with pytest.raises(PolicyError, match=f"Class is not the class of a policy. Got class_name='{class_name}'"):
        deserialize({"class_name": class_name, "config": {}})


def test_custom_object_that_is_no_policy_is_refused():  # P-12
    with pytest.raises(PolicyError, match="Class is not the class of a policy"):
        deserialize({"class_name": "Mine", "config": {}}, custom_objects={"Mine": dict})


class Mine(DTypePolicy):
    """A user's own policy."""


@pytest.mark.parametrize("name", ["Mine", "MyPackage>Mine"])
def test_custom_class_is_read_where_it_is_given(name):
    config = {"class_name": "Mine", "config": {"name": "float16"}, "registered_name": "MyPackage>Mine"}
    assert deserialize(config, custom_objects={name: Mine}) == Mine("float16")


def test_custom_class_is_read_inside_a_map():
    policies = DTypePolicyMap("float32", {"a": Mine("float16")})
    assert deserialize(serialize(policies), custom_objects={"Mine": Mine})["a"] == Mine("float16")


def test_unknown_setting_in_a_config_names_the_nearest():
    config = {"mode": "float8", "source_name": "float32", "amax_history": 3}
    with pytest.raises(PolicyError, match=r"has no setting amax_history.*did you mean 'amax_history_length'"):
        deserialize({"class_name": "QuantizedFloat8DTypePolicy", "config": config})


def test_only_policies_are_serialized():
    with pytest.raises(PolicyTypeError, match="Only policies can be serialized"):
        serialize("float32")


def test_mode_of_every_policy_is_a_record():
    names = {
        name: registry.mode_of(get(name)).name
        for name in ("int32", "keep", "int8/weight_from_float32", "awq/4/8_from_keep")
    }
    assert names == {
        "int32": "float",
        "keep": "keep",
        "int8/weight_from_float32": "int8/weight",
        "awq/4/8_from_keep": "awq",
    }


def test_new_mode_is_one_record(monkeypatch):
    monkeypatch.setattr(registry, "_MODES", dict(registry._MODES))
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))

    class TernaryDTypePolicy(QuantizedDTypePolicy):
        """Weights of three values."""

    registry.register(registry.Mode(Grammar("ternary"), TernaryDTypePolicy, kinds=("linear",)))
    policy = get("ternary_from_float32")
    assert repr(policy) == '<TernaryDTypePolicy "ternary_from_float32">'
    assert deserialize(serialize(policy)) == policy
    assert DTypePolicyMap(None, {"a": "ternary"})["a"].name == "ternary_from_keep"


def test_class_of_the_mode_is_found_whatever_class_wrote_it():
    config = {"class_name": "QuantizedDTypePolicy", "config": {"mode": "int4/64", "source_name": "float32"}}
    assert deserialize(config) == Int4DTypePolicy("int4/64", "float32")
