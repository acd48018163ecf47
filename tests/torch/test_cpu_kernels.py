"""Integer kernels against exact integer arithmetic, on the largest sums there are."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from narrowcast.torch import cpu_kernels
from narrowcast.torch.cpu_kernels import Fbgemm, OneDnn, Spread, spread

SHAPES = [
    (1, 1, 1),
    (1, 1, 5),
    (3, 1, 4),
    (2, 2, 3),
    (5, 7, 1),
    (4, 13, 17),
    (33, 129, 31),
    (64, 256, 48),
    (3, 1000, 8),
]


def codes(*shape, seed=0, largest=127):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(torch.int8)


def exact(x, weight, scale):
    """The sum in integers, one rounding to float32, one multiplication: what every kernel has to give, bit for bit."""
    return (x.long() @ weight.long().t()).to(torch.float32) * scale.reshape(-1)


def scales(num):
    return torch.rand(num, 1, generator=torch.Generator().manual_seed(1)) + 0.01


def test_the_kernels_that_this_cpu_uses_are_exact_on_the_largest_sums():
    kernels = cpu_kernels.cpu_kernels()
    for kernel in {kernels.few, kernels.many} - {None}:
        for rows, inner, outer in SHAPES:
            for x, w in itertools.product((127, -127), repeat=2):
                layout = kernel(torch.full((outer, inner), w, dtype=torch.int8), torch.ones(outer, 1))
                product = layout.multiply(torch.full((rows, inner), float(x)))
                assert (product == x * w * inner).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_spread_kernel_is_exact_on_any_codes(shape):
    rows, inner, outer = shape
    x, weight, scale = codes(rows, inner), codes(outer, inner, seed=2), scales(outer)
    assert torch.equal(Spread(weight, scale).multiply(x.float()), exact(x, weight, scale))


@pytest.mark.parametrize("kernel", [OneDnn, Fbgemm])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_kernels_are_exact_where_no_pair_can_overflow(kernel, shape):
    rows, inner, outer = shape
    # Two neighbours of at most 64 stay within 255 * 128 on every CPU.
    x, weight, scale = codes(rows, inner), codes(outer, inner, seed=2, largest=64), scales(outer)
    assert torch.equal(kernel(weight, scale).multiply(x.float()), exact(x, weight, scale))


@pytest.mark.skipif(not cpu_kernels.has_dot_product(), reason="saturates without an 8-bit dot product")
@pytest.mark.parametrize("kernel", [OneDnn, Fbgemm])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_kernels_are_exact_on_any_codes_with_a_dot_product(kernel, shape):
    rows, inner, outer = shape
    x, weight, scale = codes(rows, inner), codes(outer, inner, seed=2), scales(outer)
    assert torch.equal(kernel(weight, scale).multiply(x.float()), exact(x, weight, scale))


@pytest.mark.parametrize("kernel", [OneDnn, Fbgemm, Spread])
def test_codes_may_come_as_bytes_shifted_by_128(kernel):
    x, weight, scale = codes(6, 20), codes(9, 20, seed=2, largest=64), scales(9)
    shifted = (x.to(torch.int16) + 128).to(torch.uint8)
    layout = kernel(weight, scale)
    assert torch.equal(layout.multiply(shifted), layout.multiply(x.float()))


@pytest.mark.parametrize("kernel", [OneDnn, Fbgemm, Spread])
def test_a_layout_does_not_change_with_the_weight_it_was_made_from(kernel):
    x, weight, scale = codes(6, 20).float(), codes(9, 20, seed=2, largest=64), scales(9)
    layout = kernel(weight, scale)
    expected = layout.multiply(x)
    weight.zero_()
    scale.zero_()
    assert torch.equal(layout.multiply(x), expected)


def test_a_kernel_that_saturates_is_found_out():
    """What oneDNN and FBGEMM do without VNNI, written out: sums of two products stop at 16 bits."""

    class Saturating:
        num_bytes = 0

        def __init__(self, weight, scale):
            self.weight = weight.long()

        def multiply(self, x):
            shifted = x.long() + 128
            pairs = shifted[:, None, 0::2] * self.weight[:, 0::2] + shifted[:, None, 1::2] * self.weight[:, 1::2]
            return (pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * self.weight.sum(-1)).float()

    assert not cpu_kernels._fits(Saturating)


def test_a_kernel_that_this_pytorch_does_not_have_is_not_used(monkeypatch):
    def gone(weight, scale):
        raise AttributeError("no such operator")

    assert not cpu_kernels._fits(gone)


@pytest.mark.parametrize(
    "has_dot_product, fits, expected",
    [
        (True, {OneDnn, Spread}, (True, OneDnn, OneDnn)),
        (True, {Spread}, (False, Spread, Spread)),
        (False, {OneDnn, Fbgemm, Spread}, (False, Spread, Spread)),
        (False, set(), (False, None, None)),
    ],
)
def test_the_choice_of_kernels_goes_by_what_the_cpu_has_and_what_is_exact(monkeypatch, has_dot_product, fits, expected):
    monkeypatch.setattr(cpu_kernels, "has_dot_product", lambda: has_dot_product)
    monkeypatch.setattr(cpu_kernels, "_fits", lambda kernel: kernel in fits)
    monkeypatch.setattr(cpu_kernels, "_crossover", lambda: 0)
    cpu_kernels.cpu_kernels.cache_clear()
    try:
        assert tuple(cpu_kernels.cpu_kernels()) == (*expected, 0)
    finally:
        cpu_kernels.cpu_kernels.cache_clear()


# Fixed costs in us and products a us, of FBGEMM and of oneDNN, and up to how many products the former is faster.
@pytest.mark.parametrize(
    "fbgemm, onednn, expected",
    [
        ((20, 100_000), (40, 400_000), 20 / (1 / 100_000 - 1 / 400_000)),
        ((20, 400_000), (40, 400_000), cpu_kernels.MOST_FEW_PRODUCTS),
        ((20, 390_000), (40, 400_000), cpu_kernels.MOST_FEW_PRODUCTS),
        ((40, 400_000), (20, 400_000), 0),
    ],
)
def test_the_kernel_with_the_lower_fixed_cost_takes_few_products(monkeypatch, fbgemm, onednn, expected):
    costs = {Fbgemm: fbgemm, OneDnn: onednn}

    def seconds(kernel, rows, inner, outer):
        fixed, rate = costs[kernel]
        return (fixed + rows * inner * outer / rate) * 1e-6

    monkeypatch.setattr(cpu_kernels, "has_dot_product", lambda: True)
    monkeypatch.setattr(cpu_kernels, "_fits", lambda kernel: True)
    monkeypatch.setattr(cpu_kernels, "_time", seconds)
    cpu_kernels.cpu_kernels.cache_clear()
    try:
        found = cpu_kernels.cpu_kernels()
    finally:
        cpu_kernels.cpu_kernels.cache_clear()
    assert found.few_products == pytest.approx(expected, rel=1e-6)
    assert found[:3] == (True, Fbgemm if expected else OneDnn, OneDnn)


def test_the_crossover_is_measured_in_little_time():
    assert 0 <= cpu_kernels._crossover() <= cpu_kernels.MOST_FEW_PRODUCTS


def gathered(wide, positions, num_inner):
    """The weight that a spread one stands for."""
    return torch.zeros(len(wide), num_inner, dtype=torch.long).index_add_(1, positions, wide.long())


def assert_cannot_overflow(wide):
    pairs = torch.nn.functional.pad(wide.long(), (0, wide.shape[1] % 2)).view(len(wide), -1, 2)
    assert 255 * pairs.clamp(min=0).sum(2).max() <= 2**15 - 1
    assert 255 * pairs.clamp(max=0).sum(2).min() >= -(2**15)


def test_every_pair_of_codes_is_spread_so_that_it_cannot_overflow():
    values = torch.arange(-127, 128)
    weight = torch.cartesian_prod(values, values).to(torch.int8)
    wide, positions = spread(weight)
    assert torch.equal(gathered(wide, positions, 2), weight.long())
    assert_cannot_overflow(wide)


@pytest.mark.parametrize("inner", [1, 2, 3, 4, 5, 6, 7, 64, 129])
@pytest.mark.parametrize("make", [lambda n: codes(16, n), lambda n: torch.full((3, n), -127, dtype=torch.int8)])
def test_spread_weights_add_up_and_neither_at_the_seams_do_neighbours_overflow(inner, make):
    weight = make(inner)
    wide, positions = spread(weight)
    assert torch.equal(gathered(wide, positions, inner), weight.long())
    assert_cannot_overflow(wide)
    assert inner <= wide.shape[1] <= 2 * inner + 2


def test_normal_weights_take_one_and_a_half_times_the_multiplications():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    weight = (weight * (127 / weight.abs().amax(1, keepdim=True))).round().to(torch.int8)
    assert Spread(weight, scales(64)).num_bytes <= 64 * (512 * 3 // 2 + 4)


def test_weights_without_large_neighbours_stay_as_they_are():
    weight = codes(8, 63, largest=64)
    wide, positions = spread(weight)
    assert torch.equal(wide, weight)
    assert positions.tolist() == list(range(63))
    assert Spread(weight, scales(8)).num_bytes == 8 * 63


def test_packing_neither_warns_nor_changes_the_quantized_engine():
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)
        try:
            Fbgemm(codes(4, 8), scales(4))
        finally:
            torch.set_warn_always(False)
    assert torch.backends.quantized.engine == engine


def test_another_default_device_changes_nothing():
    x, weight, scale = codes(4, 8).float(), codes(3, 8, largest=64), torch.ones(3, 1)
    expected = cpu_kernels.cpu_kernels()
    cpu_kernels.cpu_kernels.cache_clear()
    try:
        with torch.device("meta"):
            assert cpu_kernels.cpu_kernels() == expected
            for kernel in (OneDnn, Fbgemm, Spread):
                assert kernel(weight, scale).multiply(x).device.type == "cpu"
    finally:
        cpu_kernels.cpu_kernels.cache_clear()
