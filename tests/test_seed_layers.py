"""The examples of the two reference pages that narrowcast's policies come from, where they need layers.

They stand here as the pages have them, with narrowcast in place of Keras, and with their outputs as a shell shows them.
"""

from __future__ import annotations

import doctest
import subprocess
import sys
import textwrap

import pytest
import torch

import narrowcast as keras
import narrowcast.layers
import narrowcast.saving
from narrowcast import dtype_policies

GLOBAL_POLICY = """
>>> import narrowcast as keras
>>> keras.config.set_dtype_policy("mixed_float16")
>>> layer1 = keras.layers.Dense(10)
>>> layer1.dtype_policy  # layer1 will automatically use mixed precision
<DTypePolicy "mixed_float16">
>>> # Can optionally override layer to use float32
>>> # instead of mixed precision.
>>> layer2 = keras.layers.Dense(10, dtype="float32")
>>> layer2.dtype_policy
<DTypePolicy "float32">
>>> # Set policy back to initial float32.
>>> keras.config.set_dtype_policy('float32')
"""

POLICY_MAP = """
>>> from narrowcast import dtype_policies
>>> from narrowcast.dtype_policies import DTypePolicyMap
>>> bfloat16 = dtype_policies.DTypePolicy("bfloat16")
>>> float16 = dtype_policies.DTypePolicy("float16")
>>> float32 = dtype_policies.DTypePolicy("float32")
>>> policy_map = DTypePolicyMap(default_policy=float32)

>>> # Set policies using an exact path and a regex pattern.
>>> # Note: "decoder" will only match the exact path, not its children.
>>> policy_map["encoder/layer_0/dense"] = bfloat16
>>> policy_map["encoder/.*"] = float16
>>> policy_map["decoder"] = bfloat16

>>> # 1. An exact match is found and returned directly.
>>> policy_map["encoder/layer_0/dense"].name
'bfloat16'

>>> # 2. A regex match is found for a child layer.
>>> # It matches the "encoder/.*" pattern.
>>> policy_map["encoder/attention/query"].name
'float16'

>>> # 3. No implicit prefix matching occurs.
>>> # "decoder/attention" does not match the key "decoder".
>>> # The default policy is returned.
>>> policy_map["decoder/attention"].name
'float32'

>>> # 4. A ValueError is raised if a path matches multiple patterns.
>>> policy_map["encoder/attention/.*"] = bfloat16
>>> # "encoder/attention/query" now matches two patterns:
>>> # - "encoder/.*"
>>> # - "encoder/attention/.*"
>>> try:
...     policy_map["encoder/attention/query"]
... except ValueError as e:
...     print(e)
Path 'encoder/attention/query' matches multiple dtype policy ...
"""


@keras.saving.register_keras_serializable("MyPackage")
class MyMultiHeadAttention(keras.layers.MultiHeadAttention):
    def get_config(self):
        config = super().get_config()
        dtype_policy_map = dtype_policies.DTypePolicyMap()
        for layer in self._flatten_layers():
            if layer.dtype_policy.quantization_mode is not None:
                dtype_policy_map[layer.path] = layer.dtype_policy
        if len(dtype_policy_map) > 0:
            config.update({"dtype": dtype_policy_map})
        return config


@keras.saving.register_keras_serializable("MyPackage")
class Inner(keras.layers.Layer):
    """A layer around the attention; its own config says nothing of it."""

    def __init__(self, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.attention = MyMultiHeadAttention(num_heads, 8)
        self.norm = keras.layers.LayerNormalization()

    def call(self, x):
        return self.norm(x + self.attention(x, x))


@keras.saving.register_keras_serializable("MyPackage")
class Outer(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Inner(2), Inner(num_heads=4)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _global_policy_restored():
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("example", [GLOBAL_POLICY, POLICY_MAP], ids=["global policy", "policy map"])
def test_an_example_prints_what_the_page_prints(example):
    test = doctest.DocTestParser().get_doctest(example, {}, "page", None, None)
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert results.failed == 0
    assert results.attempted > 5


def test_a_name_is_the_policy_of_that_name():
    by_name = keras.layers.Dense(10, dtype="float32")
    by_policy = keras.layers.Dense(10, dtype=keras.config.DTypePolicy("float32"))
    assert by_name.dtype_policy == by_policy.dtype_policy


def attention(policy="mixed_bfloat16"):
    layer = MyMultiHeadAttention(2, 8, dtype=policy)
    layer.build((None, 5, 16), (None, 5, 16))
    return layer


def policies(layer):
    return {inner.path: inner.dtype_policy for inner in layer._flatten_layers()}


def test_the_attention_of_the_page_records_its_quantized_layers_by_their_paths_within_it():
    layer = attention()
    layer.quantize("int8", filters=["query", "value"])
    assert list(layer.get_config()["dtype"]) == ["query", "value"]


def test_the_attention_of_the_page_says_its_own_policy_where_nothing_is_quantized():
    assert attention().get_config()["dtype"] == "mixed_bfloat16"


def test_the_attention_of_the_page_comes_back_from_its_config_with_every_policy():
    layer = attention()
    layer.quantize("int8", filters="query|attention_output")
    again = MyMultiHeadAttention.from_config(layer.get_config())
    again.build((None, 5, 16), (None, 5, 16))
    assert policies(again) == policies(layer)


def test_it_comes_back_a_second_time():
    layer = attention()
    layer.quantize("int8", filters="query")
    again = MyMultiHeadAttention.from_config(layer.get_config())
    again.build((None, 5, 16), (None, 5, 16))
    third = MyMultiHeadAttention.from_config(again.get_config())
    third.build((None, 5, 16), (None, 5, 16))
    assert policies(third) == policies(layer)


def nested():
    torch.manual_seed(0)
    model = Outer(dtype="mixed_bfloat16").eval()
    model(torch.ones(1, 5, 16))
    model.quantize("int8", filters=r"blocks/\d/attention/(query|key)")
    return model


def test_nested_two_levels_deep_it_comes_back_by_serialize_and_deserialize():
    model = nested()
    again = keras.saving.deserialize(keras.saving.serialize(model))
    assert policies(again) == policies(model)
    assert "blocks/1/attention/query" in policies(again)


def test_nested_two_levels_deep_it_comes_back_by_config_alone():
    model = nested()
    again = Outer.from_config(model.get_config())
    again.build((None, 5, 16))
    assert policies(again) == policies(model)


def test_paths_within_a_config_are_relative_at_any_depth():
    model = nested()
    inner = model.blocks[1].attention
    assert inner.query.path == "blocks/1/attention/query"
    assert set(inner.get_config()["dtype"]) == {"query", "key"}
    assert inner.query.path == "blocks/1/attention/query"


def test_nested_two_levels_deep_it_saves_and_loads_without_its_code_being_called(tmp_path):
    model = nested()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    keras.save(model, tmp_path)
    again = keras.load(tmp_path)
    assert policies(again) == policies(model)
    assert torch.equal(again(x), model(x))


def test_it_predicts_the_same_bits_in_another_process(tmp_path):
    model = nested()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    keras.save(model, tmp_path / "model")
    torch.save(x, tmp_path / "x.pt")
    script = textwrap.dedent("""
        import sys, torch, narrowcast
        import tests.test_seed_layers  # registers the classes
        folder = sys.argv[1]
        torch.save(narrowcast.load(folder + "/model")(torch.load(folder + "/x.pt")), folder + "/y.pt")
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(x))
