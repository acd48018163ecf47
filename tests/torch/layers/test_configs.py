"""Configs: every argument, every policy, plain JSON, unchanged by reading."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from narrowcast import config as global_config
from narrowcast import layers, saving
from narrowcast.dtype_policies import DTypePolicyMap, QuantizedFloat8DTypePolicy
from narrowcast.errors import ConfigError, LayerError, UnsupportedError
from narrowcast.torch.layers import initializers
from tests.torch.layers.models import Block, Scale, block, floats, ids, policies, transformer
from tests.torch.layers.peer import keras

EXAMPLES = {
    "Activation": lambda: layers.Activation("gelu"),
    "BatchNormalization": lambda: layers.BatchNormalization(1, 0.9, 1e-5, beta_regularizer="l1"),
    "Conv1D": lambda: layers.Conv1D(4, 3, 2, "causal", groups=1, kernel_regularizer="l2"),
    "Conv2D": lambda: layers.Conv2D(4, (3, 2), padding="same", activation="relu", data_format="channels_first"),
    "Dense": lambda: layers.Dense(4, "relu", False, "he_normal", kernel_regularizer="l2", activity_regularizer="l1"),
    "Dropout": lambda: layers.Dropout(0.3, (None, 1), 7),
    "EinsumDense": lambda: layers.EinsumDense("abc,cd->abd", (None, 4), "silu", "d"),
    "Embedding": lambda: layers.Embedding(9, 4, "zeros", mask_zero=True),
    "GroupedQueryAttention": lambda: layers.GroupedQueryAttention(4, 4, 2, 0.1, use_gate=True, seed=3),
    "Layer": lambda: layers.Layer(),
    "LayerNormalization": lambda: layers.LayerNormalization([1, 2], 1e-6, False),
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 4, 3, 0.1, output_shape=5, sliding_window=2),
    "RMSNormalization": lambda: layers.RMSNormalization(-2, 1e-3),
    "ReversibleEmbedding": lambda: layers.ReversibleEmbedding(9, 4, False, logit_soft_cap=3.0, reverse_dtype="float32"),
    "Sequential": lambda: layers.Sequential([layers.Dense(3), layers.Softmax([1])]),
    "Softmax": lambda: layers.Softmax([1, 2]),
    "TransformerBlock": lambda: layers.TransformerBlock(8, 2, 1, 0.1, "gelu", use_causal_mask=True),
}


def test_there_is_an_example_of_every_layer():
    assert sorted(EXAMPLES) == sorted(name for name in layers.__all__ if isinstance(getattr(layers, name), type))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_config_makes_an_equal_layer(name):
    layer = EXAMPLES[name]()
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_config_is_plain_json(name):
    config = EXAMPLES[name]().get_config()
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layer_comes_back_from_json(name):
    layer = EXAMPLES[name]()
    again = saving.deserialize(json.loads(json.dumps(saving.serialize(layer))))
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_config_is_not_changed_by_making_a_layer(name):
    config = EXAMPLES[name]().get_config()
    before = copy.deepcopy(config)
    type(EXAMPLES[name]()).from_config(config)
    assert config == before


@pytest.mark.parametrize("name", [name for name in EXAMPLES if hasattr(keras.layers, name)])
def test_every_argument_of_keras_is_an_argument_here_with_its_default(name):
    import inspect

    theirs = inspect.signature(getattr(keras.layers, name).__init__).parameters
    ours = inspect.signature(getattr(layers, name).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    for argument, parameter in theirs.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or argument == "self":
            continue
        if argument not in ours:
            # Those that no layer here supports are taken by the common base, and refused unless they are None.
            assert takes_any
            assert parameter.default is None
        else:
            default = parameter.default
            # A length for each axis, where one number stands for all here.
            assert ours[argument].default == (default[0] if isinstance(default, tuple) else default)


@pytest.mark.parametrize(
    "theirs",
    [
        keras.layers.Activation("gelu"),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Conv1D(4, 3, padding="causal"),
        keras.layers.Conv2D(4, (3, 2), activation="relu"),
        keras.layers.Dense(4, "relu", kernel_regularizer="l2", dtype="mixed_bfloat16"),
        keras.layers.Dropout(0.3, seed=7),
        keras.layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d"),
        keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.GroupQueryAttention(4, 4, 2),
        keras.layers.LayerNormalization([1, 2], center=False),
        keras.layers.MultiHeadAttention(2, 4, 3, dropout=0.1),
        keras.layers.RMSNormalization(),
        keras.layers.ReversibleEmbedding(9, 4),
        keras.layers.Softmax([1, 2]),
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_config_of_keras_makes_the_layer_here(theirs):
    made = saving.deserialize(keras.saving.serialize_keras_object(theirs))
    assert type(made).__name__ == type(theirs).__name__
    shown = {"activation", "dropout", "rate", "seed", "epsilon", "momentum", "padding", "units", "filters", "input_dim"}
    given, own = theirs.get_config(), made.get_config()
    assert {k: own[k] for k in shown & set(own)} == {k: given[k] for k in shown & set(own)}
    assert made.dtype_policy.name == theirs.dtype_policy.name


def test_an_argument_that_a_class_does_not_take_is_an_error():
    config = {**layers.Dense(2).get_config(), "unit": 3}
    with pytest.raises(ConfigError, match="Config does not fit Dense"):
        layers.Dense.from_config(config)


def test_a_config_that_lacks_an_argument_is_an_error():
    with pytest.raises(ConfigError, match="'units'"):
        layers.Dense.from_config({})


def test_a_value_that_does_not_fit_is_an_error():
    with pytest.raises(LayerError, match="Argument units of a layer is not usable"):
        layers.Dense.from_config({**layers.Dense(2).get_config(), "units": "two"})


def test_a_dtype_stands_as_a_name_where_it_can():
    assert layers.Dense(2, dtype=torch.bfloat16).get_config()["dtype"] == "bfloat16"


def test_an_explicit_dtype_wins_over_the_global_policy_where_it_is_loaded():
    config = layers.Dense(2, dtype="float64").get_config()
    with global_config.policy_scope("mixed_bfloat16"):
        assert layers.Dense.from_config(config).dtype_policy.name == "float64"


def test_settings_that_a_name_does_not_carry_come_back():
    policy = QuantizedFloat8DTypePolicy("float8_from_float32", 32)
    assert layers.Dense.from_config(layers.Dense(2, dtype=policy).get_config()).dtype_policy == policy


def test_autocast_that_is_off_comes_back():
    assert not layers.Dense.from_config(layers.Dense(2, autocast=False).get_config()).autocast


def test_a_layer_that_is_frozen_comes_back_frozen():
    again = layers.Dense.from_config(layers.Dense(2, trainable=False).get_config())
    again.build((None, 3))
    assert not any(p.requires_grad for p in again.parameters())


def test_an_activity_regularizer_comes_back():
    again = layers.Dense.from_config(layers.Dense(2, activity_regularizer="l2").get_config())
    assert again.activity_regularizer.get_config() == {"l2": 0.01}


def test_a_class_without_a_config_of_its_own_says_its_arguments():
    assert {k: v for k, v in Scale(2.0, name="s").get_config().items() if k != "dtype"} == {
        "offset": 2.0,
        "name": "s",
        "trainable": True,
    }


def test_a_class_that_takes_no_arguments_of_layers_gets_its_policy_all_the_same():
    class Fixed(layers.Layer):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def call(self, x):
            return x

    layer = Fixed(3)
    layer.dtype_policy = "bfloat16"
    again = Fixed.from_config(layer.get_config())
    assert (again.size, again.dtype_policy.name) == (3, "bfloat16")


def test_a_class_whose_arguments_have_no_names_says_what_it_needs():
    class Star(layers.Layer):
        def __init__(self, *sizes):
            super().__init__()

    with pytest.raises(ConfigError, match="have no names"):
        Star(1, 2).get_config()


def test_policies_of_layers_below_that_differ_stand_in_a_map():
    layer = block(16, inputs=16, dtype="mixed_bfloat16")
    layer.up.quantize("int8")
    config = layer.get_config()["dtype"]
    assert config["config"]["default_policy"] == "mixed_bfloat16"
    assert list(config["config"]["policy_map"]) == ["up"]


def test_they_come_back_also_where_the_author_gave_a_layer_a_dtype():
    class Fixed(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(16, dtype="float32")

        def call(self, x):
            return self.dense(x)

    layer = Fixed()
    layer(floats(2, 16))
    layer.quantize("int8")
    again = Fixed.from_config(layer.get_config())
    again(floats(2, 16))
    assert policies(again) == policies(layer)


def test_the_author_s_own_map_stands_as_long_as_it_is_true():
    given = DTypePolicyMap("float32", {"u.*": "bfloat16"})
    layer = block(dtype=given)
    assert saving.deserialize(layer.get_config()["dtype"]) == given
    layer.norm.dtype_policy = "float64"
    assert set(saving.deserialize(layer.get_config()["dtype"])) == {"up", "norm"}


def test_a_map_of_patterns_makes_the_same_layers_again():
    layer = block(16, inputs=16, dtype=DTypePolicyMap("float32", {".*": "int8", "native/.*": "keep"}))
    again = Block.from_config(layer.get_config())
    again.build((None, 16))
    assert policies(again) == policies(layer)


def test_every_mode_that_is_carried_out_comes_back_in_a_map():
    given = DTypePolicyMap("float32", {"up": "int8/weight_from_float32", "native/1": "float8_from_float32"})
    layer = block(16, inputs=16, dtype=given)
    again = Block.from_config(json.loads(json.dumps(saving.serialize(layer)))["config"])
    again.build((None, 16))
    assert policies(again) == policies(layer)


def test_a_model_of_blocks_comes_back_with_its_shapes():
    model = transformer(2)
    again = saving.deserialize(json.loads(json.dumps(saving.serialize(model))))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(ids()), model(ids()))


def test_a_custom_activation_must_be_registered():
    with pytest.raises(ConfigError, match="Function is not registered"):
        layers.Dense(2, activation=lambda x: x).get_config()


def test_the_seed_of_an_initializer_comes_back():
    layer = layers.Dense(3, kernel_initializer=initializers.GlorotNormal(seed=5))
    again = layers.Dense.from_config(layer.get_config())
    layer.build((None, 3)), again.build((None, 3))
    assert torch.equal(layer.kernel, again.kernel)


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Dense(0),
        lambda: layers.Dense(2.5),
        lambda: layers.Dense(True),
        lambda: layers.Dense(2**63),
        lambda: layers.Embedding(0, 2),
        lambda: layers.Dropout(1.5),
        lambda: layers.Dropout(0.5, noise_shape="all"),
        lambda: layers.Dropout(0.5, seed="x"),
        lambda: layers.Conv1D(4, 3, padding="full"),
        lambda: layers.Conv2D(4, 3, padding="causal"),
        lambda: layers.Conv2D(4, (3, 3, 3)),
        lambda: layers.Conv1D(4, 3, data_format="nchw"),
        lambda: layers.Conv1D(4, 3, groups=3),
        lambda: layers.Conv1D(4, 3, strides=2, dilation_rate=2),
        lambda: layers.MultiHeadAttention(0, 4),
        lambda: layers.MultiHeadAttention(2, 4, sliding_window=0),
        lambda: layers.GroupedQueryAttention(4, 3, 2),
        lambda: layers.BatchNormalization(momentum=2),
        lambda: layers.Activation("reluu"),
        lambda: layers.Activation(torch.nn.ReLU),
        lambda: layers.Dense(2, activation={"class_name": "function", "config": "Dense"}),
        lambda: layers.BatchNormalization(axis="last"),
        lambda: layers.BatchNormalization(axis=[1]),
        lambda: layers.BatchNormalization(momentum="high"),
        lambda: layers.BatchNormalization(epsilon="small"),
        lambda: layers.LayerNormalization(epsilon="small"),
        lambda: layers.RMSNormalization(epsilon=None),
        lambda: layers.TransformerBlock(8, 2, layer_norm_epsilon="small"),
        lambda: layers.Softmax("last"),
        lambda: layers.Embedding(3, 2, weights=[[1.0, 2.0, 3.0]]),
        lambda: layers.Dense(2, kernel_initializer="glorot"),
        lambda: layers.Dense(2, kernel_regularizer="l3"),
        lambda: layers.Sequential([1]),
    ],
)
def test_an_argument_that_is_not_usable_is_an_error(make):
    with pytest.raises(LayerError):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Dense(2, kernel_constraint="non_neg"),
        lambda: layers.Dense(2, lora_rank=4),
        lambda: layers.BatchNormalization(renorm=True),
        lambda: layers.BatchNormalization(synchronized=True),
        lambda: layers.LayerNormalization(rms_scaling=True),
        lambda: layers.MultiHeadAttention(2, 4, flash_attention=True),
    ],
)
def test_an_argument_of_keras_that_is_not_supported_says_so(make):
    with pytest.raises(UnsupportedError, match="not supported"):
        make()


@pytest.mark.parametrize(
    "equation, output_shape, shape",
    [
        ("ab->ac", 3, (2, 4)),
        ("ab,bc->ac...", 3, (2, 4)),
        ("ab,bc->ad", 3, (2, 4)),
        ("ab,bd->ac", 3, (2, 4)),
        ("abc,cd->abd", (None, 3), (2, 4)),
        ("ab,bc->ac", (3, 3), (2, 4)),
        ("abc,cd->abd", (5, 3), (2, 4, 4)),
        ("abc,bd->acd", (None, None), (2, 4, 4)),
    ],
)
def test_an_equation_that_does_not_fit_is_an_error(equation, output_shape, shape):
    with pytest.raises(LayerError):
        layers.EinsumDense(equation, output_shape).build(shape)


def test_a_bias_on_an_axis_that_is_not_there_is_an_error():
    with pytest.raises(LayerError, match="cannot have the axis 'z'"):
        layers.EinsumDense("ab,bc->ac", 3, bias_axes="z").build((2, 4))


def test_an_axis_that_is_no_number_is_the_error_that_it_is_in_keras():
    with pytest.raises(TypeError, match="Axis of a norm is not usable"):
        layers.LayerNormalization(axis="last")


def test_an_axis_that_the_input_has_not_is_an_error():
    with pytest.raises(LayerError, match="has an axis that its input has not"):
        layers.LayerNormalization(axis=3).build((None, 4))


def test_a_value_and_key_of_different_lengths_are_an_error():
    with pytest.raises(LayerError, match="have different lengths"):
        layers.MultiHeadAttention(2, 4)(floats(1, 3, 8), floats(1, 4, 8), floats(1, 5, 8))


@pytest.mark.parametrize(
    "shape", [None, (), (None,), (None, 3), {"a": (2, 3, 4)}, [(2, 3, 4), (2, 3, 4)], (2, 3, 4, 5), (2, 3, None)]
)
def test_a_shape_that_attention_cannot_attend_over_is_an_error(shape):
    with pytest.raises(LayerError, match="GroupedQueryAttention at ''"):
        layers.GroupedQueryAttention(4, 4, 2).build(shape)
    if shape != (2, 3, 4, 5):  # which it may have
        with pytest.raises(LayerError, match="MultiHeadAttention at ''"):
            layers.MultiHeadAttention(2, 4).build(shape)


def test_attention_of_no_tensor_is_an_error():
    with pytest.raises(LayerError, match="call of MultiHeadAttention has no tensor for 'query'"):
        layers.MultiHeadAttention(2, 4)(None, None)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # PyTorch's own, of an nn.Linear without inputs
def test_a_projection_of_nothing_gives_its_bias():
    assert layers.EinsumDense("abc,cd->abd", (None, 4))(torch.ones(2, 3, 0)).eq(0).all()


def test_an_input_shorter_than_the_kernel_is_an_error():
    with pytest.raises(LayerError, match="is shorter than the kernel"):
        layers.Conv1D(4, 5).build((None, 3, 2))


def test_building_a_layer_for_other_inputs_is_an_error():
    layer = layers.Dense(2)
    layer.build((None, 3))
    with pytest.raises(LayerError, match="is built for other inputs already"):
        layer.build((None, 4))
