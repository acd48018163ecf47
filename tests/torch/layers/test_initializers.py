"""Initial values: by seed, by name, with the spread that their formulas say."""

from __future__ import annotations

import math

import pytest
import torch

from narrowcast.errors import LayerError
from narrowcast.torch.layers import initializers
from narrowcast.torch.layers.initializers import Constant, Orthogonal, VarianceScaling
from tests.torch.layers.peer import keras

RANDOM = [
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "VarianceScaling",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "LecunNormal",
    "LecunUniform",
    "Orthogonal",
]


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_gives_the_same_values_every_time(name):
    first, second = (getattr(initializers, name)(seed=3) for _ in range(2))
    assert torch.equal(first((8, 4)), second((8, 4)))
    assert torch.equal(first((8, 4)), first((8, 4)))


@pytest.mark.parametrize("name", RANDOM)
def test_another_seed_gives_other_values(name):
    make = getattr(initializers, name)
    assert not torch.equal(make(seed=3)((8, 4)), make(seed=4)((8, 4)))


@pytest.mark.parametrize("name", RANDOM)
def test_a_clone_without_a_seed_draws_others(name):
    initializer = getattr(initializers, name)()
    assert not torch.equal(initializer((8, 4)), initializer.clone()((8, 4)))


@pytest.mark.parametrize("name", RANDOM)
def test_values_are_the_same_in_every_dtype_but_for_rounding(name):
    initializer = getattr(initializers, name)(seed=1)
    assert torch.equal(initializer((8, 4), "bfloat16"), initializer((8, 4)).bfloat16())


@pytest.mark.parametrize("name", [name for name in RANDOM if name != "Orthogonal"])
def test_the_spread_is_that_of_keras(name):
    shape = (200, 300)
    mine = getattr(initializers, name)(seed=1)(shape)
    theirs = keras.ops.convert_to_tensor(getattr(keras.initializers, name)(seed=1)(shape))
    # 60,000 draws of each: a standard deviation is known to 1 / sqrt(120,000), 0.3 %; four times that and both.
    assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.025)
    assert mine.mean().item() == pytest.approx(0, abs=5 * mine.std().item() / math.sqrt(mine.numel()))


@pytest.mark.parametrize("shape, fans", [((5,), (5, 5)), ((5, 3), (5, 3)), ((2, 4, 5, 3), (40, 24)), ((), (1, 1))])
def test_fans_are_those_of_kernels(shape, fans):
    assert initializers._fans(shape, None, None) == fans


def test_axes_of_an_equation_decide_about_fans():
    assert initializers._fans((16, 4, 8), (0,), (1, 2)) == (16, 32)


def test_a_truncated_normal_ends_at_two_deviations():
    assert initializers.TruncatedNormal(stddev=0.5, seed=1)((1000,)).abs().max() <= 1


def test_rows_of_an_orthogonal_matrix_are_orthonormal():
    values = Orthogonal(seed=1)((3, 8))
    # A QR decomposition in float32 of a matrix of this size.
    torch.testing.assert_close(values @ values.t(), torch.eye(3), atol=1e-5, rtol=0)


def test_one_axis_cannot_be_orthogonal():
    with pytest.raises(LayerError, match="Orthogonal values need a matrix"):
        Orthogonal()((3,))


def test_on_the_meta_device_nothing_is_drawn():
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        assert initializers.get("glorot_uniform")((2, 3)).is_meta
    assert torch.equal(torch.random.get_rng_state(), before)


def test_constants_are_constant():
    assert Constant(3)((2,), "int32").tolist() == [3, 3]
    assert initializers.get("ones")((2,)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["he_normal", "HeNormal", "zeros", "normal", "orthogonal"])
def test_names_are_those_of_keras(name):
    assert type(initializers.get(name)).__name__.lower() == type(keras.initializers.get(name)).__name__.lower().replace(
        "orthogonalinitializer", "orthogonal"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: VarianceScaling(scale=0),
        lambda: VarianceScaling(mode="fan"),
        lambda: VarianceScaling(distribution="cauchy"),
        lambda: initializers.GlorotUniform(seed=1.5),
        lambda: initializers.get("glorot"),
        lambda: initializers.get(3),
    ],
)
def test_a_setting_that_is_not_usable_is_an_error(make):
    with pytest.raises(LayerError):
        make()
