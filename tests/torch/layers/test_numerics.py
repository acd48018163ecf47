"""Values at the edges of 16-bit dtypes: norms, softmax, masks, running statistics, penalties."""

from __future__ import annotations

import pytest
import torch

from narrowcast.errors import LayerError
from narrowcast.layers import (
    BatchNormalization,
    Dense,
    GroupedQueryAttention,
    LayerNormalization,
    MultiHeadAttention,
    RMSNormalization,
    Sequential,
    Softmax,
    TransformerBlock,
)
from tests.torch.layers.models import floats

DTYPES = ("float32", "mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize("norm", [LayerNormalization, RMSNormalization, BatchNormalization])
def test_a_norm_takes_inputs_above_the_range_of_float16(norm):
    layer = norm(dtype="mixed_float16")
    x = torch.linspace(6e4, 1e5, 64).reshape(8, 8)
    expected = norm(dtype="float32")(x)
    # One rounding of the result to float16.
    torch.testing.assert_close(layer(x).float(), expected, atol=0, rtol=2**-11)


@pytest.mark.parametrize("norm", [LayerNormalization, RMSNormalization])
def test_an_epsilon_that_float16_rounds_to_zero_still_guards(norm):
    layer = norm(epsilon=1e-12, dtype="mixed_float16")
    x = torch.zeros(2, 8, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()


def test_the_dtype_of_a_norm_s_output_does_not_depend_on_the_input():
    layer = LayerNormalization(dtype="mixed_bfloat16")
    assert {layer(floats(2, 4).to(d)).dtype for d in (torch.float16, torch.float32)} == {torch.bfloat16}


def test_running_statistics_are_float32_whatever_the_policy():
    layer = BatchNormalization(momentum=0.0, dtype="float16")
    layer(400 * floats(256, 4))
    assert layer.moving_variance.dtype is torch.float32
    assert layer.moving_variance.isfinite().all()
    # Normalized by what it has seen: of the order of one, where a variance in float16 would be infinite.
    assert 0.5 < layer.eval()(400 * floats(256, 4)).float().std() < 2


def test_a_frozen_batch_norm_uses_and_keeps_its_statistics():
    layer = BatchNormalization(trainable=False)
    layer(floats(8, 4) + 3)
    assert layer.moving_mean.tolist() == [0] * 4


def test_statistics_of_a_full_mask_are_those_of_none():
    masked, plain = BatchNormalization(), BatchNormalization()
    x = floats(4, 3, 2)
    torch.testing.assert_close(masked(x, mask=torch.ones(4, 3, dtype=torch.bool)), plain(x))


def test_a_batch_without_a_step_that_counts_is_finite():
    layer = BatchNormalization()
    assert layer(floats(4, 3, 2), mask=torch.zeros(4, 3, dtype=torch.bool)).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_softmax_keeps_sums_to_one_however_small_it_is(dtype):
    x = torch.tensor([-5e4, -6e4, 3.0])
    shares = Softmax(dtype=dtype)(x, mask=torch.tensor([True, True, False]))
    assert shares.tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softmax_of_logits_below_the_usual_constants_keeps_them(dtype):
    x = torch.tensor([-2e9, -3e9, 0.0])
    assert Softmax(dtype=dtype)(x, mask=torch.tensor([True, True, False])).tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_masked_as_a_whole_gives_zeros_with_a_finite_gradient(dtype):
    x = floats(2, 4).requires_grad_()
    shares = Softmax(dtype=dtype)(x, mask=torch.tensor([[False] * 4, [True] * 4]))
    shares.float().square().sum().backward()
    assert not shares[0].any()
    assert x.grad.isfinite().all()
    assert not x.grad[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [MultiHeadAttention, lambda n, d, **k: GroupedQueryAttention(d, n, 1, **k)])
@pytest.mark.parametrize("scores", [True, False])
def test_a_step_that_attends_to_nothing_gets_zeros_with_a_finite_gradient(layer, dtype, scores):
    made = layer(2, 4, use_bias=False, dtype=dtype)
    x = floats(1, 3, 8).requires_grad_()
    mask = torch.tensor([[[True, False, False], [False, False, False], [True, True, True]]])
    outputs = made(x, x, attention_mask=mask, return_attention_scores=scores)
    outputs = outputs[0] if scores else outputs
    outputs.float().square().sum().backward()
    assert not outputs[0, 1].any()
    assert outputs[0, [0, 2]].any(-1).all()
    assert x.grad.isfinite().all()


def test_both_ways_of_attending_agree():
    layer = MultiHeadAttention(2, 4)
    x, mask = floats(2, 5, 8), torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    outputs, _ = layer(x, x, attention_mask=mask, return_attention_scores=True)
    torch.testing.assert_close(layer(x, x, attention_mask=mask), outputs)


def test_a_mask_may_have_an_axis_for_the_heads():
    layer = MultiHeadAttention(2, 4)
    x = floats(1, 3, 8)
    mask = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    mask[:, 1] = torch.eye(3, dtype=torch.bool)
    _, scores = layer(x, x, attention_mask=mask, return_attention_scores=True)
    assert torch.equal(scores[0, 1], torch.eye(3))
    assert (scores[0, 0] > 0).all()


@pytest.mark.parametrize("values", [torch.zeros(1, 3, 3), torch.full((1, 3, 3), -1e9)])
def test_a_mask_of_floats_could_mean_two_things_and_is_refused(values):
    layer = MultiHeadAttention(2, 4)
    with pytest.raises(LayerError, match="could mean two things") as caught:
        layer(floats(1, 3, 8), floats(1, 3, 8), attention_mask=values)
    assert "Give `mask.bool()` where 1 means keep" in str(caught.value)


def test_a_mask_of_whole_numbers_keeps_where_they_are_not_zero():
    layer = MultiHeadAttention(2, 4)
    x = floats(1, 3, 8)
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 1]]])
    assert torch.equal(layer(x, x, attention_mask=mask), layer(x, x, attention_mask=mask.bool()))


def test_a_mask_that_does_not_broadcast_is_an_error():
    with pytest.raises(LayerError, match="does not broadcast to the inputs"):
        Softmax()(floats(2, 4), mask=torch.ones(3, dtype=torch.bool))


def test_a_mask_goes_through_a_sequential():
    class Pad(Sequential):
        pass

    from narrowcast.layers import Embedding

    model = Pad([Embedding(5, 8, mask_zero=True), TransformerBlock(16, 2)])
    ids = torch.tensor([[1, 2, 3, 0, 0]])
    model.build((None, 5))
    model.eval()
    padded, short = model(ids), model(ids[:, :3])
    # What comes after the mask is not attended to.
    torch.testing.assert_close(padded[:, :3], short)


def test_queries_keys_and_values_of_different_dtypes_give_the_compute_dtype():
    layer = MultiHeadAttention(2, 4, dtype="mixed_bfloat16")
    q, k, v = floats(1, 3, 8).half(), floats(1, 3, 8).bfloat16(), floats(1, 3, 8)
    assert layer(q, v, k).dtype is torch.bfloat16


def test_an_empty_batch_gives_an_empty_result():
    layer = Dense(16)
    layer.build((None, 16))
    layer.quantize("int8")
    assert layer(torch.empty(0, 16)).shape == (0, 16)
    assert MultiHeadAttention(2, 4)(torch.empty(0, 3, 8), torch.empty(0, 3, 8)).shape == (0, 3, 8)


def test_a_norm_over_a_middle_axis_is_that_of_the_moved_axis():
    x = floats(2, 5, 3)
    middle, last = LayerNormalization(axis=1), LayerNormalization(axis=-1)
    torch.testing.assert_close(middle(x), last(x.movedim(1, -1)).movedim(-1, 1))
