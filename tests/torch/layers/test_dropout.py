"""Dropout: shares, seeds, shapes of noise."""

from __future__ import annotations

import copy

import pytest
import torch

from narrowcast.layers import Dropout


def test_the_share_that_is_dropped_is_the_rate_and_the_others_grow():
    x = Dropout(0.25, seed=1)(torch.ones(40_000))
    # 40,000 draws: the share is known to 0.2 %; five times that.
    assert (x == 0).float().mean().item() == pytest.approx(0.25, abs=0.011)
    assert x.max().item() == pytest.approx(1 / 0.75)


def test_a_seed_gives_the_same_masks_call_by_call():
    first, second = Dropout(0.5, seed=3), Dropout(0.5, seed=3)
    for _ in range(3):
        assert torch.equal(first(torch.ones(64)), second(torch.ones(64)))


def test_a_seed_gives_another_mask_at_each_call():
    layer = Dropout(0.5, seed=3)
    assert not torch.equal(layer(torch.ones(64)), layer(torch.ones(64)))


def test_a_seed_does_not_touch_torch_s_own_generator():
    before = torch.random.get_rng_state()
    Dropout(0.5, seed=3)(torch.ones(64))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_seed_torch_s_own_decides():
    layer = Dropout(0.5)
    torch.manual_seed(0)
    first = layer(torch.ones(64))
    torch.manual_seed(0)
    assert torch.equal(layer(torch.ones(64)), first)


@pytest.mark.parametrize("seed", [None, 3])
def test_noise_of_a_shape_is_the_same_along_the_others(seed):
    x = Dropout(0.5, (None, 1, None), seed=seed)(torch.ones(2, 5, 64))
    assert torch.equal(x, x[:, :1].expand(x.shape))


@pytest.mark.parametrize("seed", [None, 3])
def test_everything_can_be_dropped(seed):
    assert not Dropout(1.0, seed=seed)(torch.ones(8)).any()


def test_a_copy_goes_on_where_the_original_is():
    layer = Dropout(0.5, seed=3)
    layer(torch.ones(64))
    again = copy.deepcopy(layer)
    assert torch.equal(again(torch.ones(64)), layer(torch.ones(64)))


def test_gradients_pass_where_numbers_do():
    layer = Dropout(0.5, seed=3)
    x = torch.ones(64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
