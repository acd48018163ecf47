"""The two forms of a tensor's scaling, numbers and tensors, against each other and against numerics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowcast.numerics import delayed_scaling, scaling
from narrowcast.torch.float8_rounding import FORWARD, GRADIENT, round_to
from narrowcast.torch.float8_scaling import scaling_of, snapshot

FORMATS = pytest.mark.parametrize("to", [FORWARD, GRADIENT], ids=["e4m3", "e5m2"])
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.3e-36, 2.0**-100, 1.0, 447.9, 448.0, 464.0, 1e30, LARGEST]
NOT_FINITE = [np.inf, -np.inf, np.nan]
STORED = [None, 0.0, 2.0**-130, 2.0, LARGEST]


class Other(torch.Tensor):
    """Takes the form of tensors, as any subclass does."""


def magnitudes():
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 200, dtype=np.int32)
    return np.concatenate([np.float32(SPECIAL + NOT_FINITE), bits.view(np.float32)])


def both(value, stored, to, margin=0):
    """Values, scaling and pending amax in the form of numbers and in that of tensors."""
    for form in (torch.Tensor, Other):
        x = torch.tensor([value, 0.0, -0.3 * value]).as_subclass(form)
        held, pending = None if stored is None else torch.tensor([stored]), torch.tensor([1e-30])
        found = scaling_of(x, snapshot(held, 0, x), pending, to, margin)
        values = round_to(x, found.scale, to, clip=found.clip) * found.inverse
        yield values.as_subclass(torch.Tensor), torch.as_tensor(found.scale), torch.as_tensor(found.inverse), pending


def same(a, b):
    # -0 and 0 are one here: a stored scale tells numbers whether to clip, and clipping is all that could differ.
    return torch.equal(a.reshape(-1).nan_to_num(7.0), b.reshape(-1).nan_to_num(7.0))


@FORMATS
@pytest.mark.parametrize("margin", [0, 1, 8])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_numbers_and_tensors_give_the_same_bits(stored, margin, to):
    for magnitude in magnitudes():
        numbers, tensors = both(float(magnitude), stored, to, margin)
        assert same(numbers[0], tensors[0]), magnitude
        assert same(numbers[2], tensors[2].as_subclass(torch.Tensor)), magnitude
        assert torch.equal(numbers[3], tensors[3]), magnitude
        if np.isfinite(magnitude):  # what is not finite becomes NaN through the inverse, whatever its scale
            assert same(numbers[1].float(), tensors[1].as_subclass(torch.Tensor)), magnitude


@FORMATS
@pytest.mark.parametrize("form", [torch.Tensor, Other], ids=["numbers", "tensors"])
@pytest.mark.parametrize("margin", [0, 8])
def test_scales_from_the_data_are_those_of_numerics(margin, form, to):
    for magnitude in magnitudes():
        if not np.isfinite(magnitude) or magnitude == 0:  # zeros do not tell their scale
            continue
        found = scaling_of(torch.tensor([magnitude]).as_subclass(form), None, None, to, margin)
        scale, inverse = scaling.saturating_scale(np.float32([magnitude]), to.largest, margin=margin)
        assert (float(found.scale), float(found.inverse)) == (scale.item(), inverse.item()), magnitude


@pytest.mark.parametrize("form", [torch.Tensor, Other], ids=["numbers", "tensors"])
@pytest.mark.parametrize("value", [0.1, 1e300, -1e300])
def test_the_amax_of_doubles_is_a_float32(value, form):
    pending = torch.zeros(1)
    scaling_of(torch.tensor([value], dtype=torch.float64).as_subclass(form), None, pending, FORWARD)
    with np.errstate(over="ignore"):
        expected = delayed_scaling.merge(np.zeros(1, np.float32), np.float32([abs(value)]))
    assert pending.item() == expected.item()


@pytest.mark.parametrize("of_weight", [torch.Tensor, Other], ids=["numbers", "tensors"])
@pytest.mark.parametrize("of_input", [torch.Tensor, Other], ids=["numbers", "tensors"])
def test_a_stored_scale_counts_in_whatever_form_it_was_read(of_input, of_weight):
    stored = snapshot(torch.tensor([4.0]), 0, torch.ones(1).as_subclass(of_input))
    found = scaling_of(torch.ones(1).as_subclass(of_weight), stored, None, FORWARD)
    assert float(found.scale) == 4.0
