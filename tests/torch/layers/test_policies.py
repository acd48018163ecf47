"""Which policy a layer has: given, taken from above, looked up in a map; and setting it."""

from __future__ import annotations

import threading

import numpy
import pytest
import torch
from torch import nn

import narrowcast
from narrowcast import config
from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, QuantizedDTypePolicy
from narrowcast.errors import LayerError, OverlapError, PlanError, UnsupportedError
from narrowcast.layers import (
    Activation,
    Dense,
    Dropout,
    Embedding,
    Layer,
    LayerNormalization,
    MultiHeadAttention,
    Sequential,
)
from tests.torch.layers.models import Block, Scale, block, floats, policies


@pytest.fixture(autouse=True)
def _global_policy_restored():
    yield
    config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        DTypePolicy("bfloat16"),
        torch.bfloat16,
        {"class_name": "DTypePolicy", "config": {"name": "bfloat16"}},
        DTypePolicyMap("bfloat16"),
    ],
    ids=["name", "policy", "torch dtype", "config", "map"],
)
def test_a_dtype_is_taken_in_every_form(dtype):
    layer = Dense(2, dtype=dtype)
    layer.build((None, 3))
    assert layer.dtype_policy == DTypePolicy("bfloat16")
    assert layer.kernel.dtype is torch.bfloat16


def test_a_numpy_dtype_is_taken():
    assert Dense(2, dtype=numpy.float64).dtype_policy.name == "float64"


def test_the_dtypes_of_a_layer_are_those_of_its_policy():
    layer = Dense(2, dtype="mixed_bfloat16")
    named = layer.compute_dtype, layer.variable_dtype, layer.dtype, layer.input_dtype, layer.quantization_mode
    assert named == ("bfloat16", "float32", "float32", "bfloat16", None)


def test_a_layer_has_the_global_policy_of_the_moment_it_was_made():
    config.set_dtype_policy("mixed_bfloat16")
    layer = Dense(2)
    config.set_dtype_policy("float32")
    assert layer.dtype_policy.name == "mixed_bfloat16"


def test_a_thread_makes_layers_with_the_policy_of_the_process():
    config.set_dtype_policy("mixed_bfloat16")
    found = []
    thread = threading.Thread(target=lambda: found.append(Dense(2).dtype_policy.name))
    thread.start()
    thread.join()
    assert found == ["mixed_bfloat16"]


def test_a_layer_takes_the_policy_of_the_layer_above():
    assert set(policies(block(dtype="mixed_bfloat16")).values()) == {"mixed_bfloat16"}


def test_a_layer_takes_the_policy_from_above_through_modules_of_pytorch():
    assert block(dtype="bfloat16").native[1].kernel.dtype is torch.bfloat16


def test_a_policy_of_its_own_wins_over_that_from_above():
    model = Sequential([Dense(4, dtype="float32"), Dense(2)], dtype="bfloat16")
    model.build((None, 3))
    assert [layer.dtype_policy.name for layer in model] == ["float32", "bfloat16"]


def test_the_innermost_policy_decides_about_inputs_and_variables():
    seen = {}

    class Inner(Scale):
        def call(self, inputs):
            seen[self.dtype_policy.name] = inputs.dtype, self.late.dtype
            return super().call(inputs)

    class Nest(Layer):
        def __init__(self, inner, **kwargs):
            super().__init__(**kwargs)
            self.inner = inner

        def call(self, inputs):
            return self.inner(inputs)

    Nest(Nest(Inner(dtype="float32"), dtype="mixed_bfloat16"), dtype="float64")(floats(2, 3))
    assert seen == {"float32": (torch.float32, torch.float32)}


# Maps


def test_a_map_is_looked_up_by_paths_from_the_layer_it_was_given_to():
    model = Sequential([block(dtype=DTypePolicyMap("float32", {"native/.*": "bfloat16"}))])
    found = policies(model)
    assert (found["0/up"], found["0/native/1"]) == ("float32", "bfloat16")


def test_an_exact_key_wins_over_a_pattern():
    layer = block(dtype=DTypePolicyMap("float32", {".*": "float64", "up": "bfloat16"}))
    assert (layer.up.dtype_policy.name, layer.norm.dtype_policy.name) == ("bfloat16", "float64")


def test_the_layer_itself_has_the_empty_path_in_its_map():
    layer = Scale(dtype=DTypePolicyMap("float32", {"": "bfloat16"}))
    assert layer(floats(2, 3)).dtype is torch.bfloat16


@pytest.mark.parametrize("variable", ["early", "late"])
def test_a_map_decides_about_variables_wherever_they_are_made(variable):
    layer = block(dtype=DTypePolicyMap("float32", {"scale": "bfloat16"}))
    assert getattr(layer.scale, variable).dtype is torch.bfloat16


def test_a_variable_that_was_made_too_narrow_has_the_values_of_one_that_was_not():
    class Early(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.w = self.add_weight(shape=(64,), initializer=narrowcast.torch.layers.initializers.RandomNormal(seed=1))

        def call(self, x):
            return x

    class Parent(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            with config.policy_scope("float16"):
                self.child = Early()

        def call(self, x):
            return self.child(x)

    parent = Parent(dtype=DTypePolicyMap("float32", {"child": "float64"}))
    assert parent.child.w.dtype is torch.float64 or parent.child.w.dtype is torch.float16
    parent(floats(2, 3))
    alone = Early(dtype="float64")
    alone(floats(2, 3))
    assert torch.equal(parent.child.w, alone.w)


def test_a_map_that_an_author_hands_down_stays_relative_to_its_owner():
    class HandsDown(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.middle = Sequential([Dense(4, dtype=self.dtype_policy)], dtype=self.dtype_policy)
            self.dense = Dense(4, dtype=self.dtype_policy)

        def call(self, x):
            return self.dense(self.middle(x))

    layer = HandsDown(dtype=DTypePolicyMap("float32", {"middle/.*": "bfloat16", "dense": "float64"}))
    layer.build((None, 3))
    assert policies(layer) == {"": "float32", "middle": "float32", "middle/0": "bfloat16", "dense": "float64"}


def test_one_map_fits_every_instance_of_a_model():
    given = DTypePolicyMap("float32", {"up": "bfloat16"})
    assert policies(block(dtype=given)) == policies(block(dtype=given))


def test_a_map_given_to_a_layer_is_not_changed():
    given = DTypePolicyMap("float32", {"up": "bfloat16"})
    before = given.get_config()
    layer = block(dtype=given)
    layer.up.dtype_policy = "float32"
    layer.get_config()
    assert given.get_config() == before


def test_keep_in_a_map_means_the_policy_of_floats_around():
    layer = block(dtype=DTypePolicyMap("mixed_bfloat16", {".*": "int8", "norm": "keep", "scale": "keep"}))
    assert layer.norm.dtype_policy.name == "mixed_bfloat16"
    assert layer.up.dtype_policy.name == "int8_from_mixed_bfloat16"


def test_a_default_that_is_not_given_is_the_global_policy():
    config.set_dtype_policy("mixed_bfloat16")
    assert block(dtype=DTypePolicyMap(None, {"up": "float32"})).norm.dtype_policy.name == "mixed_bfloat16"


def test_patterns_that_contradict_each_other_are_an_error_before_any_variable_is_made():
    layer = Block(8, dtype=DTypePolicyMap("float32", {"u.*": "float64", ".*p": "bfloat16"}))
    with pytest.raises(OverlapError, match="Path 'up' matches multiple dtype policy"):
        layer.up.build((None, 4))
    assert list(layer.up.parameters()) == []


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize(
    ("key", "policy", "finding"),
    [
        ("upp", "bfloat16", "Rule 'upp' matches no layer; did you mean 'up'?"),
        ("up/kernel", "bfloat16", "Rule 'up/kernel' matches no layer; did you mean 'up'?"),
        ("block/up", "bfloat16", "Rule 'block/up' matches no layer; did you mean 'up'?"),
        ("norm", "int8_from_float32", "Rule 'norm' asks for int8, and the one layer it reaches cannot have it: "),
    ],
)
def test_a_map_with_a_rule_for_nothing_is_an_error_once_the_layer_is_built(key, policy, finding, is_called):
    layer = Block(8, dtype=DTypePolicyMap("float32", {key: policy}))
    with pytest.raises(PlanError, match="Policy map does not fit Block at 'the root'") as caught:
        layer(floats(2, 4)) if is_called else layer.build((None, 8))
    assert caught.value.findings[0].startswith(finding)


def test_a_map_may_have_optional_rules_for_nothing():
    given = DTypePolicyMap("float32", {"upp": "bfloat16", "up": "bfloat16"}, optional=["upp"])
    assert block(dtype=given).up.compute_dtype == "bfloat16"


def test_a_map_that_is_handed_down_is_checked_where_it_was_given():
    class Outer(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = Block(8, dtype=kwargs["dtype"])

        def call(self, x):
            return self.inner(x)

    outer = Outer(dtype=DTypePolicyMap("float32", {"inner/up": "bfloat16"}))
    outer(floats(2, 4))
    assert outer.inner.up.compute_dtype == "bfloat16"


def test_a_map_is_checked_when_all_layers_are_built():
    class Late(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.first, self.second = Dense(4), Block(8)

        def call(self, x):
            return self.first(x) if x.shape[-1] == 4 else self.second(x)

    late = Late(dtype=DTypePolicyMap("float32", {"second/up": "bfloat16"}))
    late(torch.ones(2, 4))
    late(floats(2, 8))
    assert late.second.up.compute_dtype == "bfloat16"


def test_a_layer_that_is_not_built_says_what_it_was_given():
    given = DTypePolicyMap("float32", {"up": "bfloat16"})
    assert Block(8, dtype=given).dtype_policy is given


# Quantized policies


def test_a_layer_can_be_made_in_a_mode():
    layer = Dense(16, dtype="int8_from_float32")
    layer.build((None, 16))
    assert layer.dtype_policy == QuantizedDTypePolicy("int8", "float32")
    assert layer.core.weight_codes.dtype is torch.int8


@pytest.mark.parametrize(
    "layer", [LayerNormalization, lambda **k: Dropout(0.5, **k), lambda **k: Activation("relu", **k)]
)
def test_a_layer_that_has_no_such_mode_says_the_policy_it_starts_from(layer):
    made = layer(dtype="int8_from_mixed_bfloat16")
    made(floats(2, 8))
    assert made.dtype_policy.name == "mixed_bfloat16"


def test_a_layer_of_layers_hands_a_mode_down_to_those_that_can_carry_it():
    layer = MultiHeadAttention(2, 8, dtype="int8_from_float32")
    layer.build((None, 4, 16), (None, 4, 16))
    found = policies(layer)
    assert found["query"] == found["attention_output"] == "int8_from_float32"
    assert found["softmax"] == "float32"


def test_a_quantized_global_policy_gives_layers_without_the_mode_its_source():
    config.set_dtype_policy("int8_from_float32")
    model = Sequential([Dense(16), Dropout(0.1), LayerNormalization()])
    model.build((None, 16))
    assert [layer.dtype_policy.name for layer in model] == ["int8_from_float32", "float32", "float32"]


def test_int8_as_a_dtype_is_that_of_variables_and_says_how_to_quantize():
    with pytest.raises(UnsupportedError, match="the mode is 'int8_from_float32'"):
        Dense(2, dtype="int8").build((None, 3))


def test_a_layer_of_integers_never_casts_floats():
    class Count(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seen = self.add_weight(shape=(), trainable=False)

        def call(self, x):
            return x

    layer = Count(dtype=torch.int8)
    assert layer(torch.tensor([1.7])).item() == pytest.approx(1.7)
    assert (layer.seen.dtype, layer.dtype_policy.name) == (torch.int8, "int8")


# Setting


def test_setting_the_policy_of_a_layer_that_is_not_built_is_noted():
    layer = Dense(2)
    layer.dtype_policy = "bfloat16"
    layer.build((None, 3))
    assert layer.kernel.dtype is torch.bfloat16


def test_setting_it_on_a_built_layer_converts_the_variables():
    layer = Dense(2)
    layer.build((None, 3))
    weight = layer.core.weight
    layer.dtype_policy = "bfloat16"
    assert layer.core.weight is weight
    assert (weight.dtype, layer(floats(1, 3)).dtype) == (torch.bfloat16, torch.bfloat16)


def test_setting_a_mode_quantizes():
    layer = Dense(16)
    layer.build((None, 16))
    layer.dtype_policy = "int8_from_float32"
    assert layer.core.weight_codes.dtype is torch.int8


def test_setting_a_mode_from_another_source_converts_first():
    layer = Dense(16)
    layer.build((None, 16))
    layer.dtype_policy = "int8_from_mixed_bfloat16"
    assert layer(floats(1, 16)).dtype is torch.bfloat16


def test_setting_a_float_policy_on_a_quantized_layer_dequantizes():
    layer = Dense(16, dtype="int8_from_float32")
    layer.build((None, 16))
    dequantized = layer.kernel.clone()
    layer.dtype_policy = "float32"
    assert torch.equal(layer.kernel, dequantized)
    assert isinstance(layer.core.weight, nn.Parameter)


def test_setting_another_mode_on_a_quantized_layer_is_refused():
    layer = Dense(16, dtype="int8_from_float32")
    layer.build((None, 16))
    with pytest.raises(LayerError, match="is quantized already") as caught:
        layer.dtype_policy = "int8/weight_from_float32"
    assert "Set its policy to 'float32' first" in str(caught.value)
    assert layer.dtype_policy.name == "int8_from_float32"


def test_setting_a_mode_that_a_layer_cannot_carry_is_refused():
    layer = LayerNormalization()
    layer.build((None, 8))
    with pytest.raises(UnsupportedError, match="cannot carry 'int8_from_float32'"):
        layer.dtype_policy = "int8_from_float32"
    assert layer.dtype_policy.name == "float32"


@pytest.mark.parametrize("mode", ["gptq/4/32", "awq/4/32"])
def test_setting_a_mode_that_calibrates_is_refused_before_any_change(mode):
    layer = Dense(32)
    layer.build((None, 32))
    before = layer.kernel.clone()
    with pytest.raises(UnsupportedError):
        layer.dtype_policy = f"{mode}_from_float32"
    assert (layer.dtype_policy.name, torch.equal(layer.kernel, before)) == ("float32", True)


def test_layers_below_follow_the_layer_they_took_their_policy_from():
    layer = block()
    layer.dtype_policy = "bfloat16"
    assert set(policies(layer).values()) == {"bfloat16"}


def test_layers_below_with_a_policy_of_their_own_do_not_follow():
    model = Sequential([Dense(4, dtype="float64"), Dense(2)])
    model.build((None, 3))
    model.dtype_policy = "bfloat16"
    assert [layer.dtype_policy.name for layer in model] == ["float64", "bfloat16"]


def test_layers_below_that_were_quantized_by_themselves_do_not_follow():
    layer = block(16, inputs=16)
    layer.up.quantize("int8")
    layer.dtype_policy = "mixed_bfloat16"
    assert (layer.up.dtype_policy.name, layer.norm.dtype_policy.name) == ("int8_from_float32", "mixed_bfloat16")


def test_assigning_a_map_to_a_layer_that_has_one_replaces_it():
    layer = block(dtype=DTypePolicyMap("float32", {"up": "bfloat16"}))
    layer.dtype_policy = DTypePolicyMap("float32", {"norm": "float64"})
    assert (layer.up.dtype_policy.name, layer.norm.dtype_policy.name) == ("float32", "float64")


def test_what_apply_does_is_what_the_layer_says():
    layer = block(16, inputs=16)
    narrowcast.apply(layer, {"up": "int8", "norm": "mixed_bfloat16"})
    assert (layer.up.dtype_policy.name, layer.norm.dtype_policy.name) == ("int8_from_float32", "mixed_bfloat16")


def test_an_embedding_returns_the_compute_dtype():
    assert Embedding(5, 4, dtype="mixed_bfloat16")(torch.tensor([1])).dtype is torch.bfloat16
