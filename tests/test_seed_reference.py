"""The two reference pages that narrowcast's policies come from, line by line: each line of their tables is a test.

The pages are Keras' on `QuantizedFloat8DTypePolicy` and on `DTypePolicyMap`. What a line says of layers is tried on
layers.
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping

import numpy
import pytest
import torch

import narrowcast as keras
import narrowcast.layers
import narrowcast.saving
from narrowcast import dtype_policies
from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, QuantizedDTypePolicy, QuantizedFloat8DTypePolicy

CHECKS = {}


def line(text):
    """Registers a check under the line of a page that it checks."""

    def register(check):
        assert text not in CHECKS
        CHECKS[text] = check
        return check

    return register


@pytest.fixture(autouse=True)
def _global_policy_restored():
    yield
    keras.config.set_dtype_policy("float32")


def float8(name="mixed_bfloat16", **kwargs):
    return QuantizedFloat8DTypePolicy(name, **kwargs)


def dense(dtype=None, width=16):
    layer = keras.layers.Dense(width, dtype=dtype)
    layer.build((None, width))
    return layer


# QuantizedFloat8DTypePolicy


@line("float8: a dtype policy for a layer")
def _():
    assert dense(float8()).dtype_policy == float8()


@line("float8: inherits from QuantizedDTypePolicy")
def _():
    assert issubclass(QuantizedFloat8DTypePolicy, QuantizedDTypePolicy)


@line("float8: inherits from DTypePolicy")
def _():
    assert issubclass(QuantizedFloat8DTypePolicy, DTypePolicy)


@line("float8: QuantizedFloat8DTypePolicy(name, amax_history_length=1024)")
def _():
    assert QuantizedFloat8DTypePolicy("float32", 16).amax_history_length == 16
    assert QuantizedFloat8DTypePolicy(name="float32", amax_history_length=16).amax_history_length == 16
    assert QuantizedFloat8DTypePolicy("float32").amax_history_length == 1024


@line("float8: each layer has a policy of its own")
def _():
    model = keras.layers.Sequential([keras.layers.Dense(2, dtype="float32"), keras.layers.Dense(2, dtype="bfloat16")])
    assert [layer.dtype_policy.name for layer in model] == ["float32", "bfloat16"]


@line("float8: a policy can be passed to the dtype argument of a layer's constructor")
def _():
    assert keras.layers.Dense(2, dtype=DTypePolicy("bfloat16")).dtype_policy == DTypePolicy("bfloat16")


@line("float8: a global policy is set with config.set_dtype_policy")
def _():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert keras.layers.Dense(2).dtype_policy == DTypePolicy("mixed_bfloat16")


@line("float8: name: any dtype name, which is then used for compute and variables")
def _():
    for name in ("float32", "float64"):
        assert (float8(name).compute_dtype, float8(name).variable_dtype) == (name, name)


@line("float8: name: mixed_float16 or mixed_bfloat16 compute in 16 bits and keep variables in float32")
def _():
    for name, compute in (("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")):
        layer = dense(name)
        assert (layer.compute_dtype, layer.variable_dtype, layer.kernel.dtype) == (compute, "float32", torch.float32)


@line("float8: mixed precision is enabled with mixed_precision.set_dtype_policy")
def _():
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    assert keras.layers.Dense(2).compute_dtype == "float16"


@line("float8: example: layer1 uses mixed precision by itself")
def _():
    keras.config.set_dtype_policy("mixed_float16")
    layer1 = keras.layers.Dense(10)
    assert repr(layer1.dtype_policy) == '<DTypePolicy "mixed_float16">'


@line("float8: example: layer2 overrides it with float32")
def _():
    keras.config.set_dtype_policy("mixed_float16")
    layer2 = keras.layers.Dense(10, dtype="float32")
    assert repr(layer2.dtype_policy) == '<DTypePolicy "float32">'


@line("float8: example: the policy is set back to float32")
def _():
    keras.config.set_dtype_policy("mixed_float16")
    keras.config.set_dtype_policy("float32")
    assert keras.layers.Dense(10).dtype_policy == DTypePolicy("float32")


@line('float8: dtype="float32" is dtype=config.DTypePolicy("float32")')
def _():
    by_name = keras.layers.Dense(2, dtype="float32").dtype_policy
    assert by_name == keras.layers.Dense(2, dtype=keras.config.DTypePolicy("float32")).dtype_policy


@line("float8: attribute amax_history_length: the length of the window")
def _():
    assert float8(amax_history_length=8).amax_history_length == 8


@line("float8: amax_history_length is used for the scale in float8 training")
def _():
    layer = dense(float8("float32", amax_history_length=8))
    assert layer.core.float8_amax_history.shape[-1] == 8


@line("float8: attribute compute_dtype: the dtype that layers compute in")
def _():
    assert float8().compute_dtype == dense(float8()).compute_dtype == "bfloat16"


@line("float8: layers usually return the compute dtype")
def _():
    assert dense(float8())(torch.ones(16, 16)).dtype is torch.bfloat16


@line("float8: some operations may use float32 inside for stability")
def _():
    layer = keras.layers.LayerNormalization(dtype="mixed_float16")
    assert layer(torch.full((1, 4), 7e4) * torch.tensor([1.0, 1.1, 1.2, 1.3])).isfinite().all()


@line("float8: attribute name")
def _():
    assert float8().name == "float8_from_mixed_bfloat16"


@line("float8: attribute quantization_mode")
def _():
    assert float8().quantization_mode == dense(float8()).quantization_mode == "float8"


@line("float8: attribute variable_dtype: the dtype that layers make variables in unless they choose another")
def _():
    class Own(keras.layers.Layer):
        def build(self, shape):
            self.usual = self.add_weight(())
            self.other = self.add_weight((), dtype="float64")

        def call(self, x):
            return x

    layer = Own(dtype="mixed_bfloat16")
    layer(torch.ones(1))
    assert (layer.usual.dtype, layer.other.dtype) == (torch.float32, torch.float64)


@line("float8: where it differs from compute_dtype, variables are cast to that")
def _():
    class Own(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(())

        def call(self, x):
            self.seen = self.w.dtype
            return x * self.w

    layer = Own(dtype="mixed_bfloat16")
    layer(torch.ones(1))
    assert layer.seen is torch.bfloat16


@line("float8: regularizers of variables run in the variable dtype")
def _():
    layer = keras.layers.Dense(2, kernel_regularizer="l2", dtype="mixed_float16")
    layer.build((None, 2))
    assert layer.losses[0].dtype is torch.float32


@line("float8: method convert_input(x, autocast, dtype)")
def _():
    assert list(inspect.signature(float8().convert_input).parameters) == ["x", "autocast", "dtype"]
    assert float8().convert_input(torch.ones(1), True, "bfloat16").dtype is torch.bfloat16


@line("float8: methods get_config() and from_config(config)")
def _():
    assert QuantizedFloat8DTypePolicy.from_config(float8(amax_history_length=3).get_config()) == float8(
        amax_history_length=3
    )


# DTypePolicyMap


def example():
    policies = DTypePolicyMap(default_policy=DTypePolicy("float32"))
    policies["encoder/layer_0/dense"] = DTypePolicy("bfloat16")
    policies["encoder/.*"] = DTypePolicy("float16")
    policies["decoder"] = DTypePolicy("bfloat16")
    return policies


@line("map: dict-like, from layer paths to policies")
def _():
    assert isinstance(example(), MutableMapping)


@line("map: inherits from DTypePolicy")
def _():
    assert issubclass(DTypePolicyMap, DTypePolicy)


@line("map: DTypePolicyMap(default_policy=None, policy_map=None)")
def _():
    names = [n for n, p in inspect.signature(DTypePolicyMap).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["default_policy", "policy_map"]
    assert len(DTypePolicyMap(None, None)) == 0


@line("map: can be used in get_config of layers and subclasses")
def _():
    class Own(keras.layers.Sequential):
        def get_config(self):
            return {**super().get_config(), "dtype": DTypePolicyMap("float32", {"0": "bfloat16"})}

    made = Own.from_config(Own([keras.layers.Dense(2)]).get_config())
    made.build((None, 2))
    assert made[0].dtype_policy.name == "bfloat16"


@line("map: register_keras_serializable registers a subclass")
def _():
    @keras.saving.register_keras_serializable("ReferencePage")
    class Own(keras.layers.MultiHeadAttention):
        pass

    assert keras.saving.get_registered_object("ReferencePage>Own") is Own


@line("map: _flatten_layers() lists the layers of a layer")
def _():
    layer = keras.layers.MultiHeadAttention(2, 4)
    layer.build((None, 3, 8), (None, 3, 8))
    paths = [inner.path for inner in layer._flatten_layers()]
    assert paths[:5] == ["", "query", "key", "value", "softmax"]


@line("map: layer.dtype_policy.quantization_mode says whether a layer is quantized")
def _():
    layer = dense()
    assert layer.dtype_policy.quantization_mode is None
    layer.quantize("int8")
    assert layer.dtype_policy.quantization_mode == "int8"


@line("map: layer.path is a key")
def _():
    model = keras.layers.Sequential([keras.layers.Dense(2)])
    assert DTypePolicyMap("float32", {"0": "bfloat16"})[model[0].path].name == "bfloat16"


@line('map: config.update({"dtype": map}) makes the layer again with its policies')
def _():
    layer = keras.layers.MultiHeadAttention(2, 8)
    config = layer.get_config()
    config.update({"dtype": DTypePolicyMap("float32", {"query": QuantizedDTypePolicy("int8", "float32")})})
    again = keras.layers.MultiHeadAttention.from_config(config)
    again.build((None, 3, 16), (None, 3, 16))
    assert (again.query.quantization_mode, again.key.quantization_mode) == ("int8", None)


@line("map: a key may be a regular expression")
def _():
    layer = keras.layers.MultiHeadAttention(2, 4, dtype=DTypePolicyMap("float32", {"(query|key)": "bfloat16"}))
    layer.build((None, 3, 8), (None, 3, 8))
    assert [x.dtype_policy.name for x in (layer.query, layer.key, layer.value)] == ["bfloat16", "bfloat16", "float32"]


@line("map: default_policy: where it is not given, config.dtype_policy()")
def _():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert DTypePolicyMap().default_policy == keras.config.dtype_policy()


@line("map: policy_map: an optional dict")
def _():
    assert DTypePolicyMap(policy_map={"a": DTypePolicy("float16")})["a"].name == "float16"


@line("map: example 1: an exact match is returned")
def _():
    assert example()["encoder/layer_0/dense"].name == "bfloat16"


@line("map: example 2: a regular expression matches a child")
def _():
    assert example()["encoder/attention/query"].name == "float16"


@line("map: example 3: no prefix matches, the default is returned")
def _():
    assert example()["decoder/attention"].name == "float32"


@line("map: example 4: several matches are a ValueError")
def _():
    policies = example()
    policies["encoder/attention/.*"] = DTypePolicy("bfloat16")
    with pytest.raises(ValueError, match="Path 'encoder/attention/query' matches multiple dtype policy "):
        policies["encoder/attention/query"]


@line("map: attribute compute_dtype")
def _():
    assert DTypePolicyMap("mixed_float16").compute_dtype == "float16"


@line("map: attribute default_policy")
def _():
    assert example().default_policy == DTypePolicy("float32")


@line("map: attribute name")
def _():
    assert example().name == "map_float32"


@line("map: attribute quantization_mode")
def _():
    assert example().quantization_mode is None
    assert DTypePolicyMap("int8_from_float32").quantization_mode == "int8"


@line("map: attribute variable_dtype")
def _():
    assert DTypePolicyMap("mixed_float16").variable_dtype == "float32"


@line("map: method clear")
def _():
    policies = example()
    policies.clear()
    assert len(policies) == 0


@line("map: method convert_input casts tensors, symbolic tensors and NumPy arrays")
def _():
    policies = example()
    assert policies.convert_input(torch.ones(1), True, "float16").dtype is torch.float16
    assert policies.convert_input(numpy.ones(1), True, "float16").dtype == numpy.float16


@line("map: convert_input leaves integers and obeys autocast")
def _():
    ids, x = torch.arange(2), torch.ones(1)
    assert example().convert_input(ids, True, "float16") is ids
    assert example().convert_input(x, False, "float16") is x


@line("map: method from_config(config, custom_objects=None)")
def _():
    assert DTypePolicyMap.from_config(example().get_config(), custom_objects=None) == example()


@line("map: method get(key, default=None): the policy, or None without a match")
def _():
    assert example().get("encoder/x").name == "float16"
    assert example().get("nothing") is None


@line("map: get raises a ValueError for several matches")
def _():
    policies = example()
    policies[".*/x"] = DTypePolicy("bfloat16")
    with pytest.raises(ValueError, match="matches multiple"):
        policies.get("encoder/x")


@line("map: method get_config")
def _():
    assert set(example().get_config()) == {"default_policy", "policy_map"}


@line("map: methods items, keys, values: views")
def _():
    policies = example()
    keys, values, items = policies.keys(), policies.values(), policies.items()
    policies["new"] = DTypePolicy("float16")
    assert (len(keys), len(values), len(items)) == (4, 4, 4)


@line("map: method pop: the default where given, else KeyError")
def _():
    policies = example()
    assert policies.pop("decoder").name == "bfloat16"
    assert policies.pop("decoder", None) is None
    with pytest.raises(KeyError):
        policies.pop("decoder")


@line("map: method popitem: KeyError when empty")
def _():
    policies = DTypePolicyMap("float32", {"a": "float16"})
    assert policies.popitem() == ("a", DTypePolicy("float16"))
    with pytest.raises(KeyError):
        policies.popitem()


@line("map: method setdefault")
def _():
    policies = example()
    assert policies.setdefault("a", DTypePolicy("float16")).name == "float16"
    assert policies.setdefault("a", DTypePolicy("float64")).name == "float16"


@line("map: method update from a mapping, from pairs and from keywords")
def _():
    policies = DTypePolicyMap("float32")
    policies.update({"a": "float16"}, b="float16")
    policies.update([("c", "float16")])
    assert list(policies) == ["a", "b", "c"]


@line("map: __contains__ speaks of keys")
def _():
    assert "decoder" in example()
    assert "encoder/attention/query" not in example()


@line("map: __eq__")
def _():
    assert example() == example()
    assert example() != DTypePolicyMap("float32")


@line("map: __getitem__: exact key, then the whole path as a regular expression, then the default")
def _():
    policies = DTypePolicyMap("float32", {"encoder": "float16"})
    assert (policies["encoder"].name, policies["encoder/x"].name, policies["my/encoder"].name) == (
        "float16",
        "float32",
        "float32",
    )


@line("map: __iter__ and __len__")
def _():
    assert list(example()) == ["encoder/layer_0/dense", "encoder/.*", "decoder"]
    assert len(example()) == 3


@line("map: dtype_policies.get, serialize and deserialize read it")
def _():
    assert dtype_policies.deserialize(dtype_policies.serialize(example())) == example()
    assert dtype_policies.get(example()) == example()


@pytest.mark.parametrize("text", CHECKS)
def test_the_line_holds(text):
    CHECKS[text]()


def test_there_is_a_check_for_every_line():
    # 26 lines of the page on the float8 policy, 38 of that on the map.
    assert sum(text.startswith("float8:") for text in CHECKS) == 26
    assert sum(text.startswith("map:") for text in CHECKS) == 38
