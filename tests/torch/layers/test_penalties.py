"""Losses of layers: penalties on variables in the variable dtype, on outputs in float32, and what `call` adds."""

from __future__ import annotations

import pytest
import torch

from narrowcast.errors import LayerError
from narrowcast.layers import Dense, Embedding, Layer, LayerNormalization, MultiHeadAttention, Sequential
from narrowcast.torch.layers import regularizers
from narrowcast.torch.layers.regularizers import L1, L1L2, L2, OrthogonalRegularizer
from tests.torch.layers.models import floats
from tests.torch.layers.peer import UNIT, assert_same, keras


def built(layer, *shape):
    layer.build((None, *(shape or (4,))))
    return layer


@pytest.mark.parametrize("regularizer", [L1(0.1), L2(0.1), L1L2(0.1, 0.2), OrthogonalRegularizer(0.1, "columns")])
def test_a_penalty_is_that_of_keras(regularizer):
    theirs = getattr(keras.regularizers, type(regularizer).__name__)(**regularizer.get_config())
    x = floats(5, 3)
    # Sums of 15 terms in float32.
    assert_same(regularizer(x), theirs(x), UNIT["float32"], 32)


def test_a_penalty_on_the_kernel_stands_in_the_losses_of_the_layer_and_of_those_above():
    model = Sequential([built(Dense(3, kernel_regularizer="l2"))])
    expected = L2()(model[0].kernel)
    assert [loss.item() for loss in model.losses] == [loss.item() for loss in model[0].losses] == [expected.item()]


def test_a_penalty_reaches_the_variable():
    layer = built(Dense(3, kernel_regularizer=L2(0.5)))
    sum(layer.losses).backward()
    torch.testing.assert_close(layer.core.weight.grad, layer.core.weight.detach())


@pytest.mark.parametrize(
    "make",
    [
        lambda: built(Dense(3, bias_regularizer="l1")),
        lambda: built(LayerNormalization(gamma_regularizer="l1")),
        lambda: built(Embedding(4, 3, embeddings_regularizer="l1")),
    ],
    ids=["bias", "gamma", "embeddings"],
)
def test_every_variable_may_have_one(make):
    assert len(make().losses) == 1


def test_every_projection_of_attention_has_the_penalty():
    layer = MultiHeadAttention(2, 4, kernel_regularizer="l2")
    layer.build((None, 3, 8), (None, 3, 8))
    assert len(layer.losses) == 4


@pytest.mark.parametrize(
    "policy, dtype", [("float32", torch.float32), ("mixed_float16", torch.float32), ("float16", torch.float16)]
)
def test_a_penalty_on_a_variable_has_the_variable_dtype(policy, dtype):
    assert built(Dense(3, kernel_regularizer="l2", dtype=policy)).losses[0].dtype is dtype


def test_a_penalty_is_the_same_within_a_call_as_outside():
    class Inside(Layer):
        def __init__(self):
            super().__init__(dtype="mixed_float16")
            self.dense = Dense(
                3, kernel_regularizer="l2", kernel_initializer=lambda shape, dtype: torch.full(shape, 300.0)
            )

        def call(self, x):
            self.seen = self.dense(x), self.dense.losses[0]
            return x

    layer = Inside()
    layer(floats(2, 4))
    assert layer.seen[1].isfinite()
    assert torch.equal(layer.seen[1], layer.losses[0])


def test_a_penalty_stays_when_the_layer_is_quantized():
    layer = built(Dense(16, kernel_regularizer="l2"), 16)
    before = layer.losses[0]
    layer.quantize("int8")
    # Each weight moved by at most half of 1/127 of the largest.
    torch.testing.assert_close(layer.losses[0], before, atol=0, rtol=0.02)


def test_a_penalty_on_outputs_is_in_float32_and_divided_by_the_batch():
    layer = Dense(4, activity_regularizer=L2(1.0), dtype="mixed_float16", kernel_initializer="ones")
    x = torch.full((2, 4), 75.0)
    layer(x)
    assert layer.losses[0].dtype is torch.float32
    assert layer.losses[0].item() == 4 * 300**2  # 2 * 4 * 300**2 / 2, which float16 cannot hold


def test_what_call_adds_is_kept_until_the_next_call():
    class Adds(Layer):
        def call(self, x):
            self.add_loss(x.sum())
            return x

    layer = Adds()
    layer(torch.ones(2))
    layer(torch.ones(3))
    assert [loss.item() for loss in layer.losses] == [3]


def test_a_layer_that_is_called_twice_in_one_call_adds_twice():
    class Twice(Layer):
        def __init__(self):
            super().__init__()
            self.dense = Dense(2, activity_regularizer="l2")

        def call(self, x):
            return self.dense(self.dense(x))

    layer = Twice()
    layer(floats(3, 2))
    layer(floats(3, 2))
    assert len(layer.losses) == 2


def test_a_loss_that_is_no_tensor_is_an_error():
    with pytest.raises(LayerError, match="Loss is not a tensor"):
        Layer().add_loss(1.0)


def test_a_regularizer_may_be_a_function():
    layer = built(Dense(3, kernel_regularizer=lambda x: x.sum()))
    assert torch.equal(layer.losses[0], layer.kernel.sum())


def test_a_penalty_on_rows_of_zeros_has_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    OrthogonalRegularizer()(x).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), True, "1"])
def test_a_factor_that_is_none_is_an_error(factor):
    with pytest.raises(LayerError, match="Factor of a regularizer is not usable"):
        L2(factor)


def test_an_unknown_name_suggests_one():
    with pytest.raises(LayerError, match="did you mean 'l1_l2'"):
        regularizers.get("l1l2")


@pytest.mark.parametrize("name", ["l1", "L2", "OrthogonalRegularizer"])
def test_a_name_means_what_it_means_in_keras(name):
    assert regularizers.get(name).get_config() == pytest.approx(keras.regularizers.get(name).get_config())


def test_both_factors_by_name_are_those_that_keras_documents():
    assert regularizers.get("l1_l2").get_config() == {"l1": 0.01, "l2": 0.01}
