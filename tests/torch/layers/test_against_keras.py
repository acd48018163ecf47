"""Every layer against Keras' own, with the same weights: outputs, gradients and one step of an optimizer.

`num_roundings` counts the roundings to the compute dtype on the longest way through the layer, forward and backward,
where one of the two libraries rounds and the other may not (Keras rounds after each operation, a layer here mostly
once; its softmax over two axes takes a difference of logarithms in the compute dtype). It is stated with each case. To
it come the roundings of float32 sums, `FLOAT32_SUMS`: of up to 112 terms, some of which cancel.
"""

from __future__ import annotations

import pytest
import torch

from narrowcast.torch.layers import activations
from tests.torch.layers.peer import (
    UNIT,
    assert_same,
    assert_same_training,
    keras,
    random_floats,
    twins,
    weights_of,
)

POLICIES = tuple(UNIT)
FLOAT32_SUMS = 128
IDS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))

# By name: how the layer is made, its inputs, and how many roundings may lie between.
SIMPLE = {
    "dense": (lambda layers, dtype: layers.Dense(5, "relu", dtype=dtype), [random_floats(4, 7)], 8),
    "dense on sequences": (lambda layers, dtype: layers.Dense(5, dtype=dtype), [random_floats(2, 3, 7)], 8),
    "dense without bias": (
        lambda layers, dtype: layers.Dense(5, "gelu", False, dtype=dtype),
        [random_floats(4, 7)],
        12,
    ),
    "einsum, heads": (
        lambda layers, dtype: layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="de", dtype=dtype),
        [random_floats(2, 3, 8)],
        8,
    ),
    "einsum, two axes summed": (
        lambda layers, dtype: layers.EinsumDense("abcd,cde->abe", (None, 6), bias_axes="e", dtype=dtype),
        [random_floats(2, 3, 2, 4)],
        8,
    ),
    "einsum, ellipsis on the left": (
        lambda layers, dtype: layers.EinsumDense("...x,xy->...y", 6, bias_axes="y", dtype=dtype),
        [random_floats(2, 3, 4)],
        8,
    ),
    "einsum, ellipsis on the right": (
        lambda layers, dtype: layers.EinsumDense("ab...,bc->ac...", 6, bias_axes="c", dtype=dtype),
        [random_floats(2, 4, 3)],
        8,
    ),
    "einsum, axes in another order": (
        lambda layers, dtype: layers.EinsumDense("abc,bd->acd", (3, 5), bias_axes="d", dtype=dtype),
        [random_floats(2, 4, 3)],
        8,
    ),
    "einsum, a common axis": (
        lambda layers, dtype: layers.EinsumDense("abc,bcd->abd", (4, 5), bias_axes="d", dtype=dtype),
        [random_floats(2, 4, 3)],
        8,
    ),
    "einsum, a bias on one of two axes": (
        lambda layers, dtype: layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="e", dtype=dtype),
        [random_floats(2, 3, 8)],
        8,
    ),
    "einsum, a bias on the steps": (
        lambda layers, dtype: layers.EinsumDense("abc,cd->abd", (3, 4), bias_axes="bd", dtype=dtype),
        [random_floats(2, 3, 8)],
        8,
    ),
    "embedding": (lambda layers, dtype: layers.Embedding(11, 6, dtype=dtype), [IDS], 4),
    "layer norm": (lambda layers, dtype: layers.LayerNormalization(dtype=dtype), [random_floats(3, 4, 6)], 24),
    "layer norm, two axes": (
        lambda layers, dtype: layers.LayerNormalization(axis=[1, 2], dtype=dtype),
        [random_floats(3, 4, 6)],
        24,
    ),
    "layer norm without center": (
        lambda layers, dtype: layers.LayerNormalization(center=False, dtype=dtype),
        [random_floats(3, 6)],
        24,
    ),
    "layer norm without scale": (
        lambda layers, dtype: layers.LayerNormalization(scale=False, dtype=dtype),
        [random_floats(3, 6)],
        24,
    ),
    "rms norm": (lambda layers, dtype: layers.RMSNormalization(dtype=dtype), [random_floats(3, 4, 6)], 24),
    "activation": (lambda layers, dtype: layers.Activation("tanh", dtype=dtype), [random_floats(3, 6)], 6),
    "softmax": (lambda layers, dtype: layers.Softmax(dtype=dtype), [random_floats(3, 6)], 8),
    "softmax over two axes": (lambda layers, dtype: layers.Softmax([1, 2], dtype=dtype), [random_floats(3, 2, 4)], 32),
    "conv over steps": (lambda layers, dtype: layers.Conv1D(5, 3, dtype=dtype), [random_floats(2, 9, 4)], 8),
    "conv, same": (lambda layers, dtype: layers.Conv1D(5, 4, padding="same", dtype=dtype), [random_floats(2, 9, 4)], 8),
    "conv, same with strides": (
        lambda layers, dtype: layers.Conv1D(5, 4, 2, padding="same", dtype=dtype),
        [random_floats(2, 9, 4)],
        8,
    ),
    "conv, causal and dilated": (
        lambda layers, dtype: layers.Conv1D(5, 3, padding="causal", dilation_rate=2, dtype=dtype),
        [random_floats(2, 9, 4)],
        8,
    ),
    "conv in groups": (lambda layers, dtype: layers.Conv1D(6, 3, groups=2, dtype=dtype), [random_floats(2, 9, 4)], 8),
    "conv, channels first": (
        lambda layers, dtype: layers.Conv1D(5, 3, data_format="channels_first", dtype=dtype),
        [random_floats(2, 4, 9)],
        8,
    ),
    "conv over images": (
        lambda layers, dtype: layers.Conv2D(5, (3, 2), activation="relu", dtype=dtype),
        [random_floats(2, 7, 8, 3)],
        8,
    ),
    "conv over images, same with strides": (
        lambda layers, dtype: layers.Conv2D(5, 3, (2, 1), padding="same", use_bias=False, dtype=dtype),
        [random_floats(2, 7, 8, 3)],
        8,
    ),
    "conv over images, dilated": (
        lambda layers, dtype: layers.Conv2D(5, 3, padding="same", dilation_rate=2, dtype=dtype),
        [random_floats(2, 7, 8, 3)],
        8,
    ),
    "attention": (
        lambda layers, dtype: layers.MultiHeadAttention(2, 4, dtype=dtype),
        [random_floats(2, 5, 8), random_floats(2, 6, 8, seed=1)],
        40,
    ),
    "attention with a key": (
        lambda layers, dtype: layers.MultiHeadAttention(2, 4, value_dim=3, dtype=dtype),
        [random_floats(2, 5, 8), random_floats(2, 6, 7, seed=1), random_floats(2, 6, 9, seed=2)],
        40,
    ),
    "attention with a gate": (
        lambda layers, dtype: layers.MultiHeadAttention(2, 4, use_gate=True, use_bias=False, dtype=dtype),
        [random_floats(2, 5, 8), random_floats(2, 6, 8, seed=1)],
        40,
    ),
    "attention over an axis of images": (
        lambda layers, dtype: layers.MultiHeadAttention(2, 4, attention_axes=2, dtype=dtype),
        [random_floats(2, 3, 4, 8), random_floats(2, 3, 4, 8, seed=1)],
        40,
    ),
    "attention to another width": (
        lambda layers, dtype: layers.MultiHeadAttention(2, 4, output_shape=6, dtype=dtype),
        [random_floats(2, 5, 8), random_floats(2, 6, 8, seed=1)],
        40,
    ),
    "attention in groups": (
        lambda layers, dtype: (
            layers.GroupQueryAttention(4, 4, 2, dtype=dtype)
            if layers is keras.layers
            else layers.GroupedQueryAttention(4, 4, 2, dtype=dtype)
        ),
        [random_floats(2, 5, 8), random_floats(2, 6, 8, seed=1)],
        40,
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", SIMPLE)
def test_it_trains_as_it_does_in_keras(case, policy):
    make, inputs, num_roundings = SIMPLE[case]
    mine, theirs = twins(make, *inputs, policy=policy)
    assert_same_training(
        mine,
        theirs,
        *inputs,
        unit=UNIT[policy],
        num_roundings=num_roundings + FLOAT32_SUMS * UNIT["float32"] / UNIT[policy],
    )


def test_attention_is_masked_as_in_keras():
    mask = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[:, :, 0] = True  # Keras gives rows that attend to nothing other values than zeros
    inputs = [random_floats(2, 5, 8), random_floats(2, 6, 8, seed=1)]
    mine, theirs = twins(lambda layers, dtype: layers.MultiHeadAttention(2, 4, dtype=dtype), *inputs)
    # Two products, a softmax and a projection in float32, sums of up to 8 terms.
    assert_same(mine(*inputs, attention_mask=mask), theirs(*inputs, attention_mask=mask), UNIT["float32"], 128)


@pytest.mark.parametrize("name", ["query_mask", "value_mask", "key_mask"])
def test_masks_of_steps_mean_what_they_mean_in_keras(name):
    inputs = [random_floats(2, 5, 8), random_floats(2, 5, 8, seed=1)]
    steps = torch.tensor([[True, True, True, False, False], [True] * 5])
    mine, theirs = twins(lambda layers, dtype: layers.MultiHeadAttention(2, 4, dtype=dtype), *inputs)
    # Keras takes masks of steps from its tensors; as an attention mask they are these.
    mask = steps[:, :, None] if name == "query_mask" else steps[:, None, :].expand(2, 5, 5)
    kept = steps if name == "query_mask" else torch.ones_like(steps)
    expected = theirs(*inputs, attention_mask=mask.expand(2, 5, 5))
    assert_same(mine(*inputs, **{name: steps})[kept], expected[kept], UNIT["float32"], 128)


@pytest.mark.parametrize("window", [None, 2])
def test_a_causal_mask_and_a_window_mean_what_they_mean_in_keras(window):
    inputs = [random_floats(2, 6, 8), random_floats(2, 6, 8, seed=1)]
    make = lambda layers, dtype: layers.MultiHeadAttention(2, 4, sliding_window=window, dtype=dtype)  # noqa: E731
    mine, theirs = twins(make, *inputs)
    assert_same(mine(*inputs, use_causal_mask=True), theirs(*inputs, use_causal_mask=True), UNIT["float32"], 128)


def test_scores_are_those_of_keras():
    inputs = [random_floats(2, 5, 8), random_floats(2, 6, 8, seed=1)]
    mine, theirs = twins(lambda layers, dtype: layers.MultiHeadAttention(2, 4, dtype=dtype), *inputs)
    for actual, expected in zip(
        mine(*inputs, return_attention_scores=True), theirs(*inputs, return_attention_scores=True), strict=True
    ):
        assert_same(actual, expected, UNIT["float32"], 128)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_is_that_of_keras(policy, training):
    x = random_floats(8, 3, 5)
    mine, theirs = twins(lambda layers, dtype: layers.BatchNormalization(momentum=0.9, dtype=dtype), x, policy=policy)
    # A norm in float32 and one rounding of its result, each way; Keras rounds its moments too.
    num_roundings = 32 + FLOAT32_SUMS * UNIT["float32"] / UNIT[policy]
    assert_same_training(mine, theirs, x, training=training, unit=UNIT[policy], num_roundings=num_roundings)


def test_masked_batch_normalization_is_that_of_keras():
    x = random_floats(8, 3, 5)
    mask = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    mine, theirs = twins(lambda layers, dtype: layers.BatchNormalization(dtype=dtype), x)
    # Keras adds 1e-7 to the number of steps that count, 12 here: 8e-9 of the result.
    assert_same(mine(x, training=True, mask=mask), theirs(x, training=True, mask=mask), UNIT["float32"], 128)
    for actual, expected in zip(mine.get_weights(), weights_of(theirs), strict=True):
        assert_same(actual, expected, UNIT["float32"], 128)


def test_a_masked_softmax_is_that_of_keras():
    x, mask = random_floats(3, 6), torch.tensor([True, False, True, True, False, True])
    mine, theirs = twins(lambda layers, dtype: layers.Softmax(dtype=dtype), x)
    assert_same(mine(x, mask=mask), theirs(x, mask=mask), UNIT["float32"], 8)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_reverse_of_an_embedding_is_that_of_keras(tied, cap):
    make = lambda layers, dtype: layers.ReversibleEmbedding(11, 6, tied, logit_soft_cap=cap, dtype=dtype)  # noqa: E731
    mine, theirs = twins(make, IDS)
    x = random_floats(3, 5, 6)
    assert_same_training(mine, theirs, x, reverse=True, unit=UNIT["float32"], num_roundings=128)


def test_dropout_keeps_what_it_is_given_outside_of_training():
    x = random_floats(3, 6)
    mine, theirs = twins(lambda layers, dtype: layers.Dropout(0.5, dtype=dtype), x)
    assert torch.equal(mine(x, training=False), theirs(x, training=False))


@pytest.mark.parametrize("name", sorted(activations._FUNCTIONS))
def test_an_activation_is_that_of_keras(name):
    x = torch.linspace(-8, 8, 101).reshape(1, 101)
    function = activations.get(name)
    expected = keras.activations.get({"hard_swish": "hard_silu", "swish": "silu"}.get(name, name))(x)
    # A few float32 operations, one of them an exponential.
    assert_same(x if function is None else function(x), expected, UNIT["float32"], 16)


def test_a_model_of_several_layers_trains_as_in_keras():
    def make(layers, dtype):
        model = keras.Sequential if layers is keras.layers else layers.Sequential
        return model(
            [
                layers.Dense(8, "relu", dtype=dtype),
                layers.LayerNormalization(dtype=dtype),
                layers.Dense(3, dtype=dtype),
            ]
        )

    x = random_floats(4, 7)
    mine, theirs = twins(make, x)
    assert_same_training(mine, theirs, x, unit=UNIT["float32"], num_roundings=128)
