"""What plans say of 8-bit layers: bytes to the last one, the kernel, and where it is not faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowcast.dtype_policies import get
from narrowcast.plan.carrier import Status
from narrowcast.plan.tree import Member, Parameter, Site
from narrowcast.torch import cpu_kernels, kernels, scheme
from narrowcast.torch.cpu_kernels import CpuKernels, Fbgemm, OneDnn, Spread
from narrowcast.torch.int8_plan import describe_int8, describe_weights
from tests.torch.int8_cases import linear, quantized, randn, verdict

MAKE = {
    "linear": lambda: linear(12, 5),
    "linear without bias": lambda: linear(12, 5, bias=False),
    "embedding": lambda: nn.Embedding(12, 5),
    "conv": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "transposed conv": lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "cross attention": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, bias=False),
}


@pytest.fixture
def cpu(monkeypatch):
    def set_kernels(*choice):
        monkeypatch.setattr(cpu_kernels, "cpu_kernels", lambda: CpuKernels(*choice))

    return set_kernels


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("policy", ["int8_from_float32", "int8/weight_from_float16", "int8_from_mixed_bfloat16"])
def test_the_bytes_told_are_the_bytes_held(kind, policy):
    told = verdict(MAKE[kind](), policy)
    held = quantized(MAKE[kind](), policy).state_dict()
    assert told.status is Status.APPLIED
    assert told.bytes_after == sum(tensor.nbytes for tensor in held.values())


def test_conv1d_of_transformers_counts_a_scale_for_each_output():
    from transformers.pytorch_utils import Conv1D

    told = verdict(Conv1D(10, 24))
    assert told.bytes_after == 240 + 10 * 4 + 10 * 4


@pytest.mark.parametrize("inner, outer", [(0, 5), (5, 0)])
@pytest.mark.parametrize("mode", ["int8", "int8/weight"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_layers_fall_back(inner, outer, mode):
    found = verdict(nn.Linear(inner, outer), f"{mode}_from_float32")
    assert found.status is Status.FELL_BACK
    assert found.reason == f"its weight is empty, shape ({outer}, {inner})"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_layers_still_compute_if_quantized_all_the_same():
    layer = quantized(nn.Linear(0, 3))
    assert torch.equal(layer(torch.zeros(2, 0)), layer.bias.expand(2, 3))


def test_a_layer_that_refuses_policies_is_no_target():
    member = Member(("",), "linear", "Linear", (Parameter("weight", (4, 4), "float32"),), None, (("refuses", "no"),))
    policy = get("int8_from_float32")
    found = scheme.find(policy, "linear").judge(Site((member,)), member, policy)
    assert (found.status, found.reason, found.bytes_after) == (Status.NOT_A_TARGET, "no", 64)


def member(inner=512, outer=512, dtype="float32"):
    return Member(("",), "linear", "Linear", (Parameter("weight", (outer, inner), dtype),))


def describe(kind, policy="int8_from_float32", device="cpu", **options):
    site = member(**options)
    return kind(site, get(policy), device, site.parameters)


def test_with_a_dot_product_the_plan_names_the_kernel_and_its_layout(cpu):
    cpu(True, OneDnn, OneDnn)
    assert describe(describe_int8) == ("oneDNN u8s8 gemm, each row of activations quantized as it comes", "", 512 * 512)
    cpu(True, Fbgemm, OneDnn, 2**20)
    assert describe(describe_int8)[::2] == (
        "FBGEMM or oneDNN u8s8 gemm, each row of activations quantized as it comes",
        2 * 512 * 512,
    )


def test_small_layers_are_told_not_to_be_faster(cpu):
    cpu(True, OneDnn, OneDnn)
    assert describe(describe_int8, inner=64, outer=64)[1] == "too small to be faster: fewer than 65,536 weights"


def test_without_a_dot_product_the_plan_says_that_many_rows_are_not_faster(cpu):
    cpu(False, Spread, Spread)
    kernel, reason, num_bytes = describe(describe_int8)
    assert kernel == "FBGEMM u8s8 gemm, each row of activations quantized as it comes"
    assert reason == "no faster than float32 for many rows: this CPU has no 8-bit dot product (VNNI)"
    assert num_bytes == 2 * 512 * 512


def test_without_any_kernel_the_plan_says_so(cpu):
    cpu(False, None, None)
    assert describe(describe_int8)[1:] == ("no faster: there is no 8-bit kernel here", 0)
    assert describe(describe_int8, device="mps")[1:] == ("no faster: there is no 8-bit kernel here", 0)


def test_on_cuda_the_plan_says_what_cublas_does_not_take():
    kernel, reason, _ = describe(describe_int8, device="cuda:0")
    assert kernel == "cuBLAS int8 gemm, each row of activations quantized as it comes"
    assert reason == "up to 16 rows are multiplied in float32 on the codes"
    kernel, reason, _ = describe(describe_int8, device="cuda:0", inner=12)
    assert kernel == "float32 gemm on the codes, each row of activations quantized as it comes"
    assert reason == "no faster: its sizes are not multiples of 8"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_weight_only_layers_are_told_to_be_smaller_and_not_faster(device):
    kernel, reason, num_bytes = describe(describe_weights, "int8/weight_from_float32", device)
    assert kernel == "float32 gemm on weights dequantized at each call"
    assert (reason, num_bytes) == ("smaller, not faster", 0)


@pytest.mark.parametrize("make", [lambda: nn.Embedding(12, 5), lambda: nn.Conv2d(6, 4, 3)])
def test_embeddings_and_convolutions_say_that_only_weights_are_quantized(make):
    assert verdict(make()).reason == "weights only; smaller, not faster"
    assert verdict(make(), "int8/weight_from_float32").reason == "smaller, not faster"


def test_layouts_take_no_more_than_the_plan_says():
    layer = linear(512, 128)
    told = verdict(layer).bytes_kernel
    quantized(layer)
    layer(randn(1, 512))
    layer(randn(3, 512))
    layer(randn(1000, 512))
    assert 0 < kernels.num_layout_bytes(layer.weight_codes) <= told
