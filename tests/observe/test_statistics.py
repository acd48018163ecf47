from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast.observe.statistics import FIELDS, HISTOGRAM, NUM_FIELDS, Groups, Narrow, compare, measure, sample

LARGEST = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float16": 65504.0,
    "bfloat16": float(ml_dtypes.finfo("bfloat16").max),
}


def fields(x: torch.Tensor, narrow: Narrow | None, max_elements: int = 1 << 20) -> dict[str, float]:
    row = measure(x, narrow, max_elements=max_elements)
    return dict(zip(FIELDS, row.tolist(), strict=False))


def log_uniform(*shape: int, low: float = -30.0, high: float = 20.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(shape, generator=generator) * (high - low) + low
    return torch.exp2(exponents) * torch.randn(shape, generator=generator).sign()


def numpy_cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded by ml_dtypes (float16 by NumPy), which share no code with torch."""
    kind = np.float16 if dtype == "float16" else np.dtype(getattr(ml_dtypes, dtype))
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(kind).astype(np.float64)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scale", [None, 0.37, 3000.0])
def test_counts_and_errors_are_those_of_an_independent_cast(dtype: str, scale: float | None) -> None:
    x = log_uniform(63, 65)
    x[0, :5] = 0.0
    groups = Groups.NONE if scale is None else Groups.TENSOR
    found = fields(x, Narrow(dtype, groups, None if scale is None else torch.tensor([scale])))
    factor = np.float32(1.0 if scale is None else scale)
    scaled = x.numpy() * factor
    rounded = numpy_cast(scaled, dtype)
    values = x.numpy().astype(np.float64)
    assert found["elements"] == x.numel()
    assert found["nonzero"] == np.count_nonzero(values)
    assert found["kept"] == np.count_nonzero(rounded)
    noise = float(((rounded / factor - values) ** 2).sum())
    # Sums of 4095 float32 squares: relative error below 4095 * 2**-24.
    assert found["noise"] == pytest.approx(noise, rel=3e-4)
    assert found["signal"] == pytest.approx(float((values**2).sum()), rel=3e-4)


@pytest.mark.parametrize(("dtype", "edge"), [("float8_e4m3fn", 464.0), ("float8_e5m2", 61440.0), ("float16", 65520.0)])
def test_saturation_begins_where_values_no_longer_round_to_the_largest(dtype: str, edge: float) -> None:
    below = torch.tensor([np.nextafter(np.float32(edge), np.float32(0)), edge])
    beyond = torch.nextafter(torch.tensor([edge]), torch.tensor([math.inf]))
    assert fields(below, Narrow(dtype))["saturated"] == 0
    assert fields(beyond, Narrow(dtype))["saturated"] == 1


@pytest.mark.parametrize("dtype", LARGEST)
def test_subnormal_counts_what_lies_between_zero_and_the_smallest_normal(dtype: str) -> None:
    smallest = {"float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14, "float16": 2.0**-14, "bfloat16": 2.0**-126}[dtype]
    x = torch.tensor([0.0, smallest / 2, -smallest * 0.99, smallest, -1.0])
    assert fields(x, Narrow(dtype))["subnormal"] == 2


def test_rows_of_int8_have_scales_of_their_own() -> None:
    x = log_uniform(16, 32, low=-6, high=6)
    found = fields(x, Narrow("int8", Groups.ROW))
    values = x.numpy()
    scale = np.float32(127) / np.abs(values).max(1, keepdims=True)
    codes = np.clip(np.round(values * scale), -127, 127)
    assert found["kept"] == np.count_nonzero(codes)
    assert found["saturated"] == 0
    noise = float(((codes.astype(np.float64) / scale - values) ** 2).sum())
    assert found["noise"] == pytest.approx(noise, rel=1e-3)  # sums of 512 float32 squares, and two roundings of scales


def test_one_scale_for_a_tensor_follows_from_its_largest_magnitude() -> None:
    x = log_uniform(8, 8)
    expected = np.float32(448.0) / np.abs(x.numpy()).max()
    assert fields(x, Narrow("float8_e4m3fn", Groups.TENSOR))["scale"] == expected


def test_scale_of_zero_means_that_the_tensor_scales_itself() -> None:
    x = log_uniform(8, 8)
    empty_state = Narrow("float8_e4m3fn", Groups.TENSOR, torch.zeros(1))
    assert fields(x, empty_state) == fields(x, Narrow("float8_e4m3fn", Groups.TENSOR))


@pytest.mark.parametrize("groups", [Groups.BLOCK, Groups.SQUARE])
def test_a_large_value_spoils_its_own_block_only(groups: Groups) -> None:
    x = torch.full((128, 256), 1e-3)
    x[0, 0] = 1e6
    kept = fields(x, Narrow("float8_e4m3fn", groups))["kept"]
    in_block = 128 if groups is Groups.BLOCK else 128 * 128
    total = 128 * 256 if groups is Groups.BLOCK else 128 * 128  # one square is sampled, the first
    assert kept == total - (in_block - 1)


def test_histogram_has_the_exponents_that_frexp_finds() -> None:
    x = log_uniform(1000, low=-40, high=40)
    row = measure(x, None, max_elements=4096)
    exponents = np.frexp(x.numpy())[1] - 1
    counts = {HISTOGRAM[place]: int(n) for place, n in enumerate(row[NUM_FIELDS:].tolist()) if n}
    assert counts == {int(e): int((exponents == e).sum()) for e in np.unique(exponents)}


def test_ends_of_the_histogram_hold_what_lies_beyond_and_zeros_are_nowhere() -> None:
    row = measure(torch.tensor([0.0, 1e-38, 1e-40, 1e38]), None, max_elements=8)[NUM_FIELDS:]
    assert (row[0], row[-1], row.sum()) == (2, 1, 3)


def test_amax_comes_from_all_elements_and_the_rest_from_the_sample() -> None:
    x = torch.ones(100_000)
    x[77_777] = -9.0
    found = fields(x, None, max_elements=100)
    assert found["amax"] == 9.0
    assert found["elements"] <= 100


@pytest.mark.parametrize("shape", [(1024, 96), (1000, 128), (7, 3, 50), (4096,)])
def test_sample_reaches_every_column(shape: tuple[int, ...]) -> None:
    width = shape[-1]
    x = torch.arange(width, dtype=torch.float32).expand(shape).contiguous()
    taken = sample(x, Groups.TENSOR, max(x.numel() // 10, width), 0)
    assert set(taken.flatten().tolist()) == (set(range(width)) if len(shape) > 1 else set(taken.flatten().tolist()))


def test_another_offset_takes_other_elements() -> None:
    x = torch.arange(1000.0)
    assert not torch.equal(sample(x, Groups.NONE, 100, 0), sample(x, Groups.NONE, 100, 1))


@pytest.mark.parametrize("groups", list(Groups))
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 5), (2, 0), (0,), (130, 131), ()])
def test_every_shape_can_be_measured(groups: Groups, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    found = fields(x, Narrow("float8_e4m3fn", groups), max_elements=64)
    assert found["nonzero"] == found["kept"] == found["elements"]
    assert (found["elements"] == 0) is (x.numel() == 0)


def test_values_that_are_not_finite_show_in_amax_and_leave_the_sums_alone() -> None:
    clean = fields(torch.tensor([1.0, 0.3]), Narrow("bfloat16"))
    spoilt = fields(torch.tensor([1.0, 0.3, math.nan]), Narrow("bfloat16"))
    assert math.isnan(spoilt.pop("amax"))
    del clean["amax"]
    assert spoilt == clean
    assert math.isinf(fields(torch.tensor([1.0, -math.inf]), Narrow("float8_e4m3fn", Groups.TENSOR))["amax"])


def test_measuring_changes_nothing_and_keeps_no_graph() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    before = x.detach().clone()
    row = measure(x * 1.0, Narrow("float8_e5m2", Groups.TENSOR), max_elements=50)
    assert torch.equal(x, before)
    assert not row.requires_grad
    assert x.grad is None


def test_non_contiguous_tensors_are_measured_as_they_look() -> None:
    x = log_uniform(32, 48)
    narrow = Narrow("float16")
    assert fields(x.t().contiguous().t(), narrow) == fields(x, narrow)


def test_comparison_takes_the_place_of_signal_and_noise() -> None:
    row = compare(measure(torch.ones(4), None, max_elements=8), torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    found = dict(zip(FIELDS, row.tolist(), strict=False))
    assert (found["signal"], found["noise"]) == (25.0, 1.0)
