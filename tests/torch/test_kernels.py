"""Which kernel multiplies what, and how long what it derived from a weight lives."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from narrowcast.torch import kernels
from narrowcast.torch.cpu_kernels import CpuKernels, Fbgemm, OneDnn, Spread
from tests.torch.test_cpu_kernels import codes, exact, scales


class Counted:
    """An exact kernel that counts how often it is made."""

    num_bytes = 7
    made = 0

    def __init__(self, weight, scale):
        type(self).made += 1
        self.weight, self.scale = weight.long().clone(), scale.clone()

    def multiply(self, x):
        return exact(x, self.weight, self.scale)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(Counted, "made", 0)
    monkeypatch.setattr(kernels, "cpu_kernels", lambda: CpuKernels(False, Counted, Counted))
    return Counted


@pytest.fixture(params=["this machine", "VNNI", "VNNI and FBGEMM", "no VNNI", "none"])
def any_cpu(request, monkeypatch):
    """Every choice of kernels that there is. Weights of at most 64 are exact in all of them on every CPU."""
    choices = {
        "VNNI": CpuKernels(True, OneDnn, OneDnn),
        "VNNI and FBGEMM": CpuKernels(True, Fbgemm, OneDnn, 2000),
        "no VNNI": CpuKernels(False, Spread, Spread),
        "none": CpuKernels(False, None, None),
    }
    if request.param in choices:
        monkeypatch.setattr(kernels, "cpu_kernels", lambda: choices[request.param])


@pytest.mark.parametrize("rows", [1, 2, 17, 300])
@pytest.mark.parametrize("inner", [1, 2, 7, 128])
@pytest.mark.parametrize("outer", [1, 3, 40])
def test_all_choices_of_kernels_give_the_same_bits(any_cpu, rows, inner, outer):
    x, weight, scale = codes(rows, inner), codes(outer, inner, seed=2, largest=64), scales(outer)
    expected = exact(x, weight, scale)
    assert torch.equal(kernels.multiply(x.float(), weight, scale), expected)
    shifted = (x.to(torch.int16) + 128).to(torch.uint8)
    assert torch.equal(kernels.multiply(shifted, weight, scale), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 5])
def test_codes_that_are_no_numbers_give_finite_products_and_leave_other_rows_alone(any_cpu, rows, bad):
    x, weight, scale = codes(rows, 16).float(), codes(4, 16, seed=2, largest=64), scales(4)
    expected = kernels.multiply(x, weight, scale)
    x[0] = bad
    product = kernels.multiply(x, weight, scale)
    assert torch.isfinite(product).all()
    assert torch.equal(product[1:], expected[1:])


def test_many_products_and_few_go_to_the_kernels_for_them(monkeypatch):
    seen = []

    def named(name):
        class Kernel(Counted):
            def multiply(self, x):
                seen.append(name)
                return super().multiply(x)

        return Kernel

    choice = CpuKernels(False, named("few"), named("many"), 4 * 8 * 2)
    monkeypatch.setattr(kernels, "cpu_kernels", lambda: choice)
    weight, scale = codes(8, 2), scales(8)
    kernels.multiply(codes(4, 2).float(), weight, scale)
    kernels.multiply(codes(5, 2).float(), weight, scale)
    assert seen == ["few", "many"]


def test_the_meta_device_gets_shapes():
    meta = torch.device("meta")
    product = kernels.multiply(
        torch.empty(3, 5, device=meta), torch.empty(4, 5, dtype=torch.int8, device=meta), torch.empty(4, 1, device=meta)
    )
    assert (product.shape, product.dtype, product.device.type) == ((3, 4), torch.float32, "meta")


def test_a_layout_is_made_once(counted):
    x, weight, scale = codes(3, 5).float(), codes(4, 5), scales(4)
    for _ in range(3):
        kernels.multiply(x, weight, scale)
    assert counted.made == 1
    assert kernels.num_layout_bytes(weight) == 7


def test_threads_that_come_at_once_make_one_layout(counted):
    x, weight, scale = codes(3, 5).float(), codes(4, 5), scales(4)
    barrier = threading.Barrier(8)

    def call():
        barrier.wait()
        for _ in range(10):
            kernels.multiply(x, weight, scale)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.made == 1


@pytest.mark.parametrize("write", ["weight", "scale"])
def test_writing_to_a_weight_or_its_scale_makes_the_layout_anew(counted, write):
    x, weight, scale = codes(3, 5).float(), codes(4, 5), scales(4)
    kernels.multiply(x, weight, scale)
    with torch.no_grad():
        if write == "weight":
            weight.copy_(codes(4, 5, seed=9))
        else:
            scale.mul_(2)
    assert torch.equal(kernels.multiply(x, weight, scale), exact(x, weight, scale))
    assert counted.made == 2


def test_another_scale_with_the_same_weight_makes_the_layout_anew(counted):
    x, weight = codes(3, 5).float(), codes(4, 5)
    kernels.multiply(x, weight, scales(4))
    other = scales(4) * 3
    assert torch.equal(kernels.multiply(x, weight, other), exact(x, weight, other))


def test_slices_of_a_weight_have_layouts_of_their_own(counted):
    x, weight, scale = codes(3, 5).float(), codes(6, 5), scales(6)
    whole = kernels.multiply(x, weight, scale)
    for part in (slice(0, 2), slice(2, 6), slice(0, 3)):
        assert torch.equal(kernels.multiply(x, weight[part], scale[part]), whole[:, part])
    assert torch.equal(kernels.multiply(x, weight, scale), whole)
    assert counted.made == 4


def test_a_layout_dies_with_its_weight(counted):
    x, weight, scale = codes(3, 5).float(), codes(4, 5), scales(4)
    kernels.multiply(x, weight, scale)
    layout = weakref.ref(next(iter(weight.untyped_storage().__dict__["_narrowcast_layouts"].values())).layout)
    assert layout() is not None
    del weight
    gc.collect()
    assert layout() is None


def test_copies_and_pickles_of_a_weight_are_without_its_layouts(counted):
    x, weight, scale = codes(3, 5).float(), codes(4, 5), scales(4)
    before = len(pickle.dumps(weight))
    kernels.multiply(x, weight, scale)
    assert kernels.num_layout_bytes(copy.deepcopy(weight)) == 0
    assert kernels.num_layout_bytes(weight.clone()) == 0
    assert len(pickle.dumps(weight)) == before
    assert kernels.num_layout_bytes(pickle.loads(pickle.dumps(weight))) == 0


def test_dropped_layouts_are_made_again(counted):
    x, weight, scale = codes(3, 5).float(), codes(4, 5), scales(4)
    kernels.multiply(x, weight, scale)
    kernels.drop_layouts(weight)
    assert kernels.num_layout_bytes(weight) == 0
    assert torch.equal(kernels.multiply(x, weight, scale), exact(x, weight, scale))


def test_weights_made_in_inference_mode_are_multiplied_in_and_out_of_it():
    with torch.inference_mode():
        x, weight, scale = codes(3, 5), codes(4, 5), scales(4)
        inside = kernels.multiply(x.float(), weight, scale)
    assert torch.equal(inside, exact(x, weight, scale))
    assert torch.equal(kernels.multiply(x.float(), weight, scale), inside)


def test_subclasses_of_tensors_are_multiplied_without_layouts(counted):
    class Wrapped(torch.Tensor):
        pass

    x, weight, scale = codes(3, 5), codes(4, 5), scales(4)
    product = kernels.multiply(x.float(), weight.as_subclass(Wrapped), scale)
    assert torch.equal(product.as_subclass(torch.Tensor), exact(x, weight, scale))
    assert counted.made == 0
