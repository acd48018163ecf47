"""Norms, softmax and losses compute in float32: values out of float16's range, statistics, dtypes of losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .floats import UNIT, put, randn

LARGE = torch.tensor([[6e4, 7e4, 8e4, 1e5], [-7e4, 7e4, 0.0, 9e4]])


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(4, eps=1e-12),
        lambda: nn.RMSNorm(4, eps=1e-12),
        lambda: nn.GroupNorm(2, 4, eps=1e-12),
        lambda: nn.BatchNorm1d(4, eps=1e-12),
        lambda: nn.InstanceNorm1d(4, eps=1e-12),
    ],
)
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_inputs_beyond_the_range_of_float16_are_normalized(norm, policy):
    x = LARGE if not isinstance(norm(), nn.InstanceNorm1d) else LARGE.view(1, 4, 2)
    expected = norm()(x)
    got = put(norm(), policy)(x)
    assert got.dtype is torch.float16
    # One rounding to float16 of float32's own result.
    assert torch.allclose(got.float(), expected, rtol=UNIT[torch.float16], atol=1e-6)


def test_gradients_of_a_norm_are_finite_for_large_and_tiny_inputs():
    for scale in (1e5, 1e-3):
        x = (randn(3, 4) * scale).requires_grad_()
        put(nn.LayerNorm(4, eps=1e-12), "mixed_float16")(x).float().pow(2).sum().backward()
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "bfloat16", "float64"])
def test_running_statistics_are_float32_and_hold_what_float16_cannot(policy):
    norm = put(nn.BatchNorm1d(3), policy)
    x = randn(4000, 3) * 400
    for _ in range(60):
        norm(x)
    assert norm.running_var.dtype is torch.float32
    # (1 - momentum) ** 60 = 0.0018 of the initial 1 is left.
    assert torch.allclose(norm.running_var, x.var(0), rtol=5e-3)
    assert norm.num_batches_tracked.item() == 60
    norm.eval()
    assert (norm(x).float().std(0) - 1).abs().max() < 1e-2


def test_statistics_that_were_16_bits_before_are_still_updated():
    norm = put(nn.BatchNorm1d(3).bfloat16(), "mixed_bfloat16")
    norm(torch.full((4, 3), 2.0))
    assert norm.running_mean.dtype is torch.bfloat16
    assert torch.allclose(norm.running_mean.float(), torch.full((3,), 0.2), rtol=UNIT[torch.bfloat16])


def test_eval_does_not_touch_statistics():
    norm = put(nn.BatchNorm1d(3), "float64").eval()
    version = norm.running_mean._version
    norm(randn(4, 3))
    assert norm.running_mean._version == version


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_dtype_does_not_depend_on_the_input(dtype):
    assert put(nn.LayerNorm(4), "mixed_bfloat16")(randn(3, 4).to(dtype)).dtype is torch.bfloat16


def test_parameters_of_a_norm_are_not_rounded():
    norm = nn.LayerNorm(4)
    torch.nn.init.constant_(norm.weight, 1 + 2.0**-10)
    expected = norm(LARGE).bfloat16()
    assert torch.equal(put(norm, "mixed_bfloat16")(LARGE), expected)


def test_softmax_of_large_logits_in_float16():
    x = torch.tensor([[7e4, 7e4, -7e4]])
    assert torch.equal(put(nn.Softmax(-1), "float16")(x), torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float16))


@pytest.mark.parametrize(
    "loss, target",
    [
        (nn.MSELoss(), torch.zeros(3, 4)),
        (nn.L1Loss(), torch.zeros(3, 4)),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), torch.tensor([0, 1, 2])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([0, 1, 2])),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(4)), torch.ones(3, 4)),
        (nn.KLDivLoss(reduction="batchmean"), torch.ones(3, 4) / 4),
        (nn.HuberLoss(), torch.zeros(3, 4)),
    ],
)
@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "bfloat16"])
def test_losses_take_16_bit_predictions_and_return_float32(loss, target, policy):
    x = (randn(3, 4) * 300).half()
    expected = loss(x.float(), target)
    got = put(loss, policy)(x, target)
    assert got.dtype is torch.float32
    assert torch.equal(got, expected)


def test_weights_of_a_loss_may_have_any_dtype():
    loss = put(nn.CrossEntropyLoss(weight=torch.ones(4)).half(), "mixed_bfloat16")
    assert loss(randn(3, 4), torch.tensor([0, 1, 2])).dtype is torch.float32
    assert loss.weight.dtype is torch.float16


def test_squares_of_300_do_not_overflow():
    assert put(nn.MSELoss(), "float16")(torch.full((2,), 300.0).half(), torch.zeros(2).half()).item() == 90000


def test_integer_images_are_not_cast_for_a_norm():
    # As for the plain layer, which says so itself.
    image = torch.ones(2, 4, dtype=torch.uint8)
    with pytest.raises((RuntimeError, NotImplementedError)):
        nn.LayerNorm(4)(image)
    with pytest.raises((RuntimeError, NotImplementedError)):
        put(nn.LayerNorm(4), "mixed_bfloat16")(image)


def test_training_and_evaluation_agree():
    torch.manual_seed(0)
    model = nn.Sequential(put(nn.Linear(4, 4), "mixed_float16"), put(nn.LayerNorm(4), "mixed_float16"))
    x = randn(8, 4)
    loss = F.mse_loss(model(x).float(), x)
    with torch.no_grad():
        assert torch.equal(F.mse_loss(model.eval()(x).float(), x), loss)
