"""The fast rounding in torch is the one of numerics, value for value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowcast.numerics import float8
from narrowcast.torch.float8_rounding import FORWARD, GRADIENT, amax, round_to
from tests.numerics.test_float8 import VECTORS, floats, random

FORMATS = {"float8_e4m3fn": FORWARD, "float8_e5m2": GRADIENT}


def expected(x, scale, name):
    return float8.quantize(x, scale, name).astype(np.float32)


def assert_same_values(actual, wanted):
    """Equal values; the sign of zero is not kept, and NaN equals NaN."""
    np.testing.assert_array_equal(actual.numpy(), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_every_midpoint_and_its_neighbours_round_as_in_numerics(name):
    x = floats(VECTORS["casts"][name]["input_f32"])
    assert_same_values(
        round_to(torch.from_numpy(x), torch.tensor(1.0), FORMATS[name]), expected(x, np.float32(1), name)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 37.25, 2.0**-20])
def test_a_million_random_values_round_as_in_numerics(name, scale):
    x = random(seed=1)
    actual = round_to(torch.from_numpy(x), torch.tensor(scale), FORMATS[name])
    assert_same_values(actual, expected(x, np.float32(scale), name))


@pytest.mark.parametrize("name", FORMATS)
def test_all_float32_exponents_and_signs_round_as_in_numerics(name):
    # Every exponent and sign with a thousand random mantissas: subnormals, infinities and NaN included.
    mantissas = np.random.default_rng(0).integers(0, 2**23, 1000, dtype=np.uint32)
    x = (np.arange(512, dtype=np.uint32)[:, None] << 23 | mantissas).view(np.float32).ravel()
    assert_same_values(
        round_to(torch.from_numpy(x), torch.tensor(1.0), FORMATS[name]), expected(x, np.float32(1), name)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_values_scaled_by_their_own_amax_need_no_clip(name):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1000, 64)).astype(np.float32))
    scale = torch.full((1000, 1), FORMATS[name].largest) / x.abs().amax(1, keepdim=True)
    unclipped = round_to(x, scale, FORMATS[name], clip=False)
    assert torch.equal(unclipped, round_to(x, scale, FORMATS[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_scaled_in_float32(dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(round_to(x, torch.tensor(3.7), FORWARD), round_to(x.float(), torch.tensor(3.7), FORWARD))


def test_strides_do_not_matter():
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(100.0)
    for view in (x.t(), x[::2, ::3], x[:1].expand(5, 40)):
        assert torch.equal(round_to(view, scale, FORWARD), round_to(view.contiguous(), scale, FORWARD))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor itself
def test_compiled_rounding_gives_the_same_values():
    torch.compiler.reset()
    x = torch.from_numpy(random(seed=2, num=100_000))
    for to in FORMATS.values():
        compiled = torch.compile(round_to, fullgraph=True, dynamic=False)(x, torch.tensor(37.25), to)
        wanted = round_to(x, torch.tensor(37.25), to)
        assert torch.equal(compiled.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("value, expected_amax", [(3.0, 5.0), (-9.0, 9.0), (np.inf, np.inf), (-np.inf, np.inf)])
def test_amax_is_the_largest_magnitude(value, expected_amax):
    assert amax(torch.tensor([1.0, value, -5.0])).item() == expected_amax
    assert amax(torch.tensor([1.0, value, -5.0], dtype=torch.bfloat16)).dtype is torch.float32


def test_amax_of_what_holds_nan_is_nan():
    assert amax(torch.tensor([1.0, np.nan, np.inf])).isnan()
