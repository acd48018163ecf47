"""Maps carried out on live Keras models."""

from __future__ import annotations

import pytest
import torch

import narrowcast.keras
from narrowcast.dtype_policies import DTypePolicyMap, QuantizedFloat8DTypePolicy
from narrowcast.errors import PlanError
from tests.keras.models import encoder_of_keras, keras, mixed_of_keras, token_ids

# What Keras itself warns of: NumPy 2, and layers that it cannot quantize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),
]


def policy_names(model):
    return {path: policy.name for path, policy in narrowcast.keras.policies_of(model).items()}


def test_a_map_quantizes_what_it_names():
    model = encoder_of_keras()
    narrowcast.keras.apply(model, {"head": "int8", "block/attention/(query|key)": "int8"})
    assert policy_names(model) == dict.fromkeys(
        ("block/attention/query", "block/attention/key", "head"), "int8_from_float32"
    )


def test_a_map_makes_built_layers_compute_in_another_dtype():
    model = encoder_of_keras()
    narrowcast.keras.apply(model, DTypePolicyMap(None, {"head": "mixed_bfloat16"}))
    assert model(token_ids()).dtype is torch.bfloat16


def test_layers_that_are_not_built_make_their_variables_by_the_map():
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    narrowcast.keras.apply(model, {"0": "bfloat16"})
    model.build((None, 4))
    assert [str(layer.kernel.dtype) for layer in model.layers] == ["bfloat16", "float32"]


def test_what_keras_cannot_do_is_said_and_nothing_is_changed():
    model = encoder_of_keras()
    with pytest.raises(PlanError, match="Keras keeps variables in the dtype they were made in, float32"):
        narrowcast.keras.apply(model, {"head": "bfloat16", "block/up": "int8"})
    assert policy_names(model) == {}


def test_a_rule_that_names_a_missing_layer_is_an_error():
    with pytest.raises(PlanError, match="heads"):
        narrowcast.keras.plan(encoder_of_keras(), {"heads": "int8"})


def test_a_plan_says_which_layers_have_no_such_mode():
    plan = narrowcast.keras.plan(mixed_of_keras(), {".*": "int8"})
    assert (plan["7"].status.value, plan["1"].reason) == ("applied", "Keras has no int8 for LayerNormalization")


@pytest.mark.parametrize("policy", ["int4/4_from_float32", "int4/-1_from_float32", "int8_from_float32"])
def test_a_mode_with_its_numbers_arrives(policy):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6)])
    narrowcast.keras.apply(model, {"0": policy})
    assert policy_names(model) == {"0": policy}


def test_the_length_of_a_history_arrives():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6)])
    narrowcast.keras.apply(model, {"0": QuantizedFloat8DTypePolicy("float8_from_float32", 16)})
    assert model.layers[0].inputs_amax_history.shape == (16,)


def test_the_policies_of_one_model_go_onto_another():
    model = encoder_of_keras()
    narrowcast.keras.apply(model, {"block/.*": "int8"})
    other = encoder_of_keras()
    narrowcast.keras.apply(other, narrowcast.keras.policies_of(model))
    assert policy_names(other) == policy_names(model)


def test_a_tree_names_kinds_and_parameters():
    tree = narrowcast.keras.tree(encoder_of_keras())
    site = tree["block/attention/query"]
    assert (tree.framework, site.kind, [p.name for p in site.parameters]) == ("keras", "linear", ["kernel", "bias"])
