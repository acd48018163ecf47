"""What flows in: floats are cast where they are, everything else stays as it is; structures keep their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from narrowcast.errors import LayerError
from narrowcast.layers import (
    Activation,
    BatchNormalization,
    Conv1D,
    Dense,
    Dropout,
    EinsumDense,
    Embedding,
    Layer,
    LayerNormalization,
    MultiHeadAttention,
    ReversibleEmbedding,
    RMSNormalization,
    Sequential,
    Softmax,
    TransformerBlock,
)
from tests.torch.layers.models import floats


class Seen(Layer):
    """Notes what its `call` gets."""

    def call(self, *args, **kwargs):
        self.seen = args, kwargs
        return args[0]


def seen_by(*args, **kwargs):
    layer = Seen(dtype="mixed_bfloat16")
    layer(*args, **kwargs)
    return layer.seen


def test_floats_are_cast_at_any_depth():
    (given,), _ = seen_by([floats(2), {"a": (floats(2), floats(2).double())}])
    assert [given[0].dtype, given[1]["a"][0].dtype, given[1]["a"][1].dtype] == [torch.bfloat16] * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64])
def test_what_is_no_float_stays_as_it_is(dtype):
    x = torch.ones(2).to(dtype)
    (given,), _ = seen_by([x, floats(2)])
    assert given[0] is x


def test_keyword_arguments_are_judged_as_the_others():
    _, kwargs = seen_by(floats(2), scale=floats(2), ids=torch.arange(2), flag=True, name="a")
    assert (kwargs["scale"].dtype, kwargs["ids"].dtype) == (torch.bfloat16, torch.int64)
    assert (kwargs["flag"], kwargs["name"]) == (True, "a")


def test_a_large_id_keeps_its_digits():
    (given,), _ = seen_by([torch.tensor([2909]), floats(2)])
    assert given[0].item() == 2909


def test_named_tuples_and_dataclasses_keep_their_types():
    class Pair(NamedTuple):
        first: Any
        second: Any

    @dataclass
    class Record:
        value: Any

    (pair, record), _ = seen_by(Pair(floats(2), torch.arange(2)), Record(floats(2)))
    assert (type(pair), pair.first.dtype, pair.second.dtype) == (Pair, torch.bfloat16, torch.int64)
    assert (type(record), record.value.dtype) == (Record, torch.bfloat16)


def test_a_container_in_which_nothing_is_cast_is_the_caller_s_own():
    given = {"ids": torch.arange(2)}
    (seen, _), _ = seen_by(given, floats(2))
    assert seen is given


def test_numpy_arrays_become_tensors_and_are_cast_as_they_are():
    (floating, whole), _ = seen_by(numpy.ones(2), numpy.arange(2, dtype="int32"))
    assert (floating.dtype, whole.dtype) == (torch.bfloat16, torch.int32)


def test_a_list_of_numbers_is_a_tensor():
    assert Activation("relu")([12, -3, 0]).tolist() == [12, 0, 0]


def test_a_list_of_numbers_is_cast_at_every_call():
    layer = Seen(dtype="mixed_bfloat16")
    for _ in range(2):  # the first call of a layer, which builds it, goes another way
        layer([[1.0, 2.0], [3.0, 4.0]])
        assert layer.seen[0][0].dtype is torch.bfloat16


def test_a_list_that_mixes_tensors_and_numbers_is_an_error():
    with pytest.raises(LayerError, match="mixes tensors and plain numbers"):
        Seen()([floats(2), 1.0])


def test_something_that_is_no_tensor_is_an_error_that_names_the_layer():
    layer = Dense(2)
    layer.build((None, 3))
    with pytest.raises(LayerError, match="Input of Dense at '' is not a tensor"):
        layer("text")


def test_a_shape_builds_embeddings_below_a_layer_that_casts_to_16_bits():
    class Lookup(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.table = Embedding(5, 3)

        def call(self, inputs):
            return self.table(inputs)

    layer = Lookup(dtype="mixed_bfloat16")
    layer.build((None, 4))
    assert layer.table.embeddings.shape == (5, 3)
    with pytest.raises(LayerError, match="16-bit floats do not hold numbers above"):
        layer(torch.zeros(1, 4))


def test_ids_in_narrow_floats_are_refused():
    with pytest.raises(LayerError, match="16-bit floats do not hold numbers above"):
        Embedding(5000, 2)(torch.tensor([2909.0], dtype=torch.bfloat16))


def test_ids_in_float32_are_taken_as_in_keras():
    assert Embedding(5000, 2)(torch.tensor([2909.0])).shape == (1, 2)


LAYERS = {
    "dense": (lambda **k: Dense(3, "relu", **k), [floats(4, 6)]),
    "einsum dense": (lambda **k: EinsumDense("ab,bc->ac", 3, bias_axes="c", **k), [floats(4, 6)]),
    "layer norm": (LayerNormalization, [floats(4, 6)]),
    "rms norm": (RMSNormalization, [floats(4, 6)]),
    "batch norm": (BatchNormalization, [floats(4, 6)]),
    "dropout": (lambda **k: Dropout(0.5, **k), [floats(4, 6)]),
    "activation": (lambda **k: Activation("gelu", **k), [floats(4, 6)]),
    "softmax": (Softmax, [floats(4, 6)]),
    "conv": (lambda **k: Conv1D(3, 2, **k), [floats(2, 5, 6)]),
    "embedding": (lambda **k: Embedding(9, 6, **k), [torch.arange(6)]),
    "reverse embedding": (lambda **k: ReversibleEmbedding(9, 6, **k), [torch.arange(6)]),
    "attention": (lambda **k: MultiHeadAttention(2, 3, **k), [floats(2, 4, 6), floats(2, 5, 6)]),
    "block": (lambda **k: TransformerBlock(8, 2, **k), [floats(2, 4, 6)]),
    "sequential": (lambda **k: Sequential([Dense(3)], **k), [floats(4, 6)]),
}
POLICIES = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_returns_the_compute_dtype_of_every_policy(name, policy):
    make, inputs = LAYERS[name]
    layer = make(dtype=policy)
    assert layer(*inputs).dtype is getattr(torch, layer.compute_dtype)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_stores_the_variable_dtype_of_every_policy(name, policy):
    make, inputs = LAYERS[name]
    layer = make(dtype=policy)
    layer(*inputs)
    assert {p.dtype for p in layer.parameters()} <= {getattr(torch, layer.variable_dtype)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in LAYERS if "embedding" not in name])
def test_every_layer_computes_what_it_computes_in_float64(name, policy):
    make, inputs = LAYERS[name]
    torch.manual_seed(0)
    exact = make(dtype="float64").eval()
    with torch.no_grad():
        expected = exact(*inputs)
    layer = make(dtype=policy).eval()
    layer(*inputs)
    layer.load_state_dict(exact.state_dict())
    unit = {"float16": 2**-11, "bfloat16": 2**-8}.get(layer.compute_dtype, 2**-24)
    # At most 30 roundings to the compute dtype on the way through a block, of magnitudes up to the largest of it.
    largest = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(layer(*inputs).double(), expected, atol=30 * unit * largest, rtol=0)


@pytest.mark.parametrize("name", ["dense", "einsum dense", "conv", "layer norm", "rms norm", "batch norm"])
def test_layers_that_need_floats_cast_whole_numbers_for_themselves(name):
    make, inputs = LAYERS[name]
    layer = make(dtype="mixed_bfloat16")
    whole = (inputs[0] * 20).to(torch.int64)
    expected = layer(whole.float())
    assert torch.equal(layer(whole), expected)
