"""The examples and tables of the two reference pages that narrowcast's policies come from, where they need no layers.

The pages are Keras' on `QuantizedFloat8DTypePolicy` and `DTypePolicyMap`. Where they write `keras`, narrowcast stands.
"""

from __future__ import annotations

import inspect
from collections.abc import ItemsView, KeysView, MutableMapping, ValuesView
from types import SimpleNamespace

import numpy
import pytest
import torch

import narrowcast as keras
from narrowcast import dtype_policies
from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, QuantizedDTypePolicy, QuantizedFloat8DTypePolicy


@pytest.fixture(autouse=True)
def _global_policy_restored():
    yield
    keras.config.set_dtype_policy("float32")


# QuantizedFloat8DTypePolicy


def test_it_inherits_from_the_quantized_and_the_plain_policy():
    assert issubclass(QuantizedFloat8DTypePolicy, QuantizedDTypePolicy)
    assert issubclass(QuantizedFloat8DTypePolicy, DTypePolicy)


def test_it_is_made_from_a_name_and_a_history_length():
    policy = QuantizedFloat8DTypePolicy(name="float8_from_mixed_bfloat16", amax_history_length=1024)
    assert policy == QuantizedFloat8DTypePolicy("float8_from_mixed_bfloat16", 1024)
    assert policy == QuantizedFloat8DTypePolicy("float8_from_mixed_bfloat16")


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_a_dtype_as_name_is_compute_and_variable_dtype(name):
    policy = QuantizedFloat8DTypePolicy(name)
    assert (policy.compute_dtype, policy.variable_dtype) == (name, name)


@pytest.mark.parametrize("name, compute_dtype", [("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")])
def test_a_mixed_name_computes_in_16_bits_and_stores_in_float32(name, compute_dtype):
    policy = QuantizedFloat8DTypePolicy(name)
    assert (policy.compute_dtype, policy.variable_dtype) == (compute_dtype, "float32")


def test_its_table_of_attributes():
    policy = QuantizedFloat8DTypePolicy("mixed_float16", amax_history_length=32)
    assert policy.amax_history_length == 32
    assert policy.compute_dtype == "float16"
    assert policy.name == "float8_from_mixed_float16"
    assert policy.quantization_mode == "float8"
    assert policy.variable_dtype == "float32"


def test_its_table_of_methods():
    policy = QuantizedFloat8DTypePolicy("mixed_float16", amax_history_length=32)
    assert policy.convert_input(torch.ones(1), True, policy.compute_dtype).dtype == torch.float16
    assert QuantizedFloat8DTypePolicy.from_config(policy.get_config()) == policy
    assert list(inspect.signature(policy.convert_input).parameters) == ["x", "autocast", "dtype"]
    assert next(iter(inspect.signature(policy.from_config).parameters)) == "config"


def test_the_global_policy_is_set_and_set_back():
    keras.config.set_dtype_policy("mixed_float16")
    assert repr(keras.config.dtype_policy()) == '<DTypePolicy "mixed_float16">'
    assert repr(dtype_policies.get("float32")) == '<DTypePolicy "float32">'
    keras.config.set_dtype_policy("float32")
    assert repr(keras.config.dtype_policy()) == '<DTypePolicy "float32">'


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_switched_on_by_its_own_module(name):
    keras.mixed_precision.set_dtype_policy(name)
    assert keras.config.dtype_policy() == keras.mixed_precision.dtype_policy() == keras.DTypePolicy(name)


def test_a_name_means_the_policy_of_that_name():
    assert dtype_policies.get("float32") == keras.config.DTypePolicy("float32")
    assert keras.config.DTypePolicy is keras.mixed_precision.DTypePolicy is keras.dtype_policies.DTypePolicy


# DTypePolicyMap


@pytest.fixture
def policy_map():
    bfloat16 = dtype_policies.DTypePolicy("bfloat16")
    float16 = dtype_policies.DTypePolicy("float16")
    float32 = dtype_policies.DTypePolicy("float32")
    policy_map = DTypePolicyMap(default_policy=float32)
    policy_map["encoder/layer_0/dense"] = bfloat16
    policy_map["encoder/.*"] = float16
    policy_map["decoder"] = bfloat16
    return policy_map


def test_1_an_exact_match_is_returned(policy_map):
    assert policy_map["encoder/layer_0/dense"].name == "bfloat16"


def test_2_a_regex_match_is_found_for_a_child(policy_map):
    assert policy_map["encoder/attention/query"].name == "float16"


def test_3_no_prefix_matches(policy_map):
    assert policy_map["decoder/attention"].name == "float32"


def test_4_several_matches_raise(policy_map):
    policy_map["encoder/attention/.*"] = dtype_policies.DTypePolicy("bfloat16")
    with pytest.raises(ValueError, match=r"^Path 'encoder/attention/query' matches multiple dtype policy "):
        policy_map["encoder/attention/query"]


def test_a_map_is_dict_like_and_a_policy(policy_map):
    assert isinstance(policy_map, DTypePolicy)
    assert isinstance(policy_map, MutableMapping)


def test_signature_of_a_map():
    parameters = inspect.signature(DTypePolicyMap).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["default_policy", "policy_map"]
    assert all(parameters[name].default is None for name in positional)


def test_table_of_attributes_of_a_map(policy_map):
    assert (policy_map.compute_dtype, policy_map.variable_dtype) == ("float32", "float32")
    assert policy_map.default_policy == DTypePolicy("float32")
    assert policy_map.name == "map_float32"
    assert policy_map.quantization_mode is None


def test_default_that_is_not_given_is_the_global_policy():
    policy_map = DTypePolicyMap()
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert policy_map.default_policy == keras.config.dtype_policy()


def test_get_returns_none_without_a_match(policy_map):
    assert policy_map.get("encoder/x").name == "float16"
    assert policy_map.get("x") is None
    assert policy_map.get("x", default=1) == 1


def test_get_raises_for_several_matches(policy_map):
    policy_map[".*/x"] = DTypePolicy("bfloat16")
    with pytest.raises(ValueError, match="matches multiple dtype policy"):
        policy_map.get("encoder/x")


def test_table_of_methods_of_a_map(policy_map):
    assert "decoder" in policy_map
    assert len(policy_map) == 3
    assert list(policy_map) == ["encoder/layer_0/dense", "encoder/.*", "decoder"]
    views = policy_map.keys(), policy_map.values(), policy_map.items()
    assert [isinstance(view, kind) for view, kind in zip(views, (KeysView, ValuesView, ItemsView), strict=True)] == [
        True
    ] * 3
    assert policy_map.pop("decoder").name == "bfloat16"
    assert policy_map.pop("decoder", 1) == 1
    with pytest.raises(KeyError):
        policy_map.pop("decoder")
    assert policy_map.setdefault("decoder", DTypePolicy("float64")).name == "float64"
    assert policy_map.setdefault("decoder", DTypePolicy("float32")).name == "float64"
    policy_map.update({"a": "float16"}, b="float16")
    policy_map.update([("c", "float16")])
    assert (policy_map["a"], policy_map["b"], policy_map["c"]) == (DTypePolicy("float16"),) * 3
    again = DTypePolicyMap.from_config(policy_map.get_config(), custom_objects=None)
    assert again == policy_map
    key, policy = policy_map.popitem()
    assert (key in policy_map, isinstance(policy, DTypePolicy)) == (False, True)
    policy_map.clear()
    assert len(policy_map) == 0
    with pytest.raises(KeyError):
        policy_map.popitem()


def test_convert_input_of_a_map_leaves_integers_and_casts_floats(policy_map):
    assert policy_map.convert_input(numpy.ones(1), True, "float16").dtype == numpy.float16
    ids = numpy.arange(3)
    assert policy_map.convert_input(ids, True, "float16") is ids


def test_map_is_built_in_get_config_from_the_layers_of_a_model():
    layers = [
        SimpleNamespace(path="mha/query", dtype_policy=QuantizedDTypePolicy("int8", "float32")),
        SimpleNamespace(path="mha/key", dtype_policy=DTypePolicy("float32")),
    ]
    config = {}
    dtype_policy_map = dtype_policies.DTypePolicyMap()
    for layer in layers:
        if layer.dtype_policy.quantization_mode is not None:
            dtype_policy_map[layer.path] = layer.dtype_policy
    if len(dtype_policy_map) > 0:
        config.update({"dtype": dtype_policy_map})
    again = dtype_policies.deserialize(dtype_policies.serialize(config["dtype"]))
    assert list(again.items()) == [("mha/query", QuantizedDTypePolicy("int8", "float32"))]
