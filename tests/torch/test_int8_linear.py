"""Linear layers in int8 and int8/weight: values, shapes, gradients, and what stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from narrowcast.numerics import int8
from narrowcast.torch import kernels
from narrowcast.torch.cpu_kernels import CpuKernels, Fbgemm, OneDnn
from tests.torch.int8_cases import bound, linear, quantized, randn

MODES = ("int8", "int8/weight")
UNIT = {"float64": 2.0**-24, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def reference(x, layer):
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.weight.double(), bias)


def by_definition(x, layer):
    """The layer written with the one definition of codes, in float64 from there."""
    codes, scale_inv = int8.quantize_rows(x)
    bias = 0.0 if layer.bias is None else layer.bias.double()
    return (codes.double() * scale_inv.double()) @ layer.weight.double().t() + bias


@pytest.mark.parametrize("leading", [(), (1,), (2,), (7,), (2, 3), (1, 1, 13), (65,)])
@pytest.mark.parametrize("inner", [1, 2, 3, 13, 64, 129])
@pytest.mark.parametrize("outer", [1, 2, 5, 97])
def test_any_shape_is_within_half_a_step_of_the_dequantized_layer(leading, inner, outer):
    layer = quantized(linear(inner, outer))
    x = randn(*leading, inner)
    y = layer(x)
    assert y.shape == (*leading, outer)
    assert ((y.double() - reference(x, layer)).abs() <= bound(x, layer)).all()


@pytest.mark.parametrize("shape", [(1, 64), (9, 64), (2, 3, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_computes_what_the_definition_of_codes_says(shape, bias):
    layer = quantized(linear(64, 32, bias))
    x = randn(*shape)
    expected = by_definition(x, layer)
    # Some roundings of float32: of the product, of two scales, of their product and of the sum with the bias.
    torch.testing.assert_close(layer(x).double(), expected, rtol=8 * 2.0**-24, atol=8 * 2.0**-24)


@pytest.mark.parametrize("policy", [f"{mode}_from_{dtype}" for mode in MODES for dtype in UNIT])
@pytest.mark.parametrize("input_dtype", ["float32", "bfloat16", "float16", "float64"])
def test_any_dtype_of_input_is_taken_and_the_compute_dtype_returned(policy, input_dtype):
    layer = quantized(linear(48, 40), policy)
    dtype = policy.rpartition("_")[2]
    x = randn(5, 48).to(getattr(torch, input_dtype))
    y = layer(x)
    assert y.dtype == getattr(torch, dtype)
    x = x.to(y.dtype)  # cast first, as under the float policy
    assert ((y.double() - reference(x, layer)).abs() <= bound(x, layer, 2 * UNIT[dtype])).all()


@pytest.mark.parametrize("policy", ["int8_from_mixed_bfloat16", "int8/weight_from_mixed_float16"])
def test_mixed_policies_keep_the_bias_in_the_variable_dtype(policy):
    layer = quantized(linear(16, 8).half(), policy)
    assert layer.bias.dtype == torch.float32
    assert layer.weight.dtype == torch.float32
    assert layer(randn(2, 16)).dtype == getattr(torch, policy.rpartition("mixed_")[2])


@pytest.mark.parametrize("dtype, unit", UNIT.items())
def test_weight_only_layers_are_exact_but_for_roundings(dtype, unit):
    layer = quantized(linear(96, 40), f"int8/weight_from_{dtype}")
    for rows in (1, 3, 4, 5, 40):
        x = randn(rows, 96).to(getattr(torch, dtype))
        expected = reference(x, layer)
        largest = x.double().abs() @ layer.weight.double().abs().t() + layer.bias.double().abs()
        # 96 additions in float32, and roundings of weight, sum and result to the dtype.
        tolerance = largest * 96 * 2.0**-24 + largest * unit + expected.abs() * 2 * unit
        assert ((layer(x).double() - expected).abs() <= tolerance).all()


def test_large_weights_are_made_floats_in_blocks(monkeypatch):
    from narrowcast.torch import int8_gemm

    layer = quantized(linear(16, 37), "int8/weight_from_float32")
    x = randn(3, 16)
    whole = layer(x)
    monkeypatch.setattr(int8_gemm, "_BLOCK", 16 * 5)
    torch.testing.assert_close(layer(x), whole, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("mode", MODES)
def test_strided_and_broadcast_inputs_give_what_contiguous_ones_give(mode):
    layer = quantized(linear(24, 10), f"{mode}_from_float32")
    base = randn(24, 6, 24)
    inputs = {
        "transposed": base.transpose(0, 2),
        "every second": randn(12, 24)[::2],
        "columns of more": randn(6, 48)[:, ::2],
        "expanded rows": randn(1, 24).expand(5, 24),
        "expanded elements": randn(4, 1).expand(4, 24),
        "a slice": base[3:5, 1:2],
    }
    for name, x in inputs.items():
        assert torch.equal(layer(x), layer(x.contiguous())), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 12), (2, 0, 12), (0, 0, 12)])
def test_empty_batches_give_empty_results(mode, shape):
    layer = quantized(linear(12, 5), f"{mode}_from_bfloat16")
    y = layer(torch.zeros(shape))
    assert (y.shape, y.dtype) == ((*shape[:-1], 5), torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "bad", [torch.zeros(3, 11), torch.zeros(12, 3), torch.zeros(()), torch.zeros(2, 12, dtype=torch.long)]
)
def test_inputs_that_do_not_fit_get_the_error_of_pytorch(mode, bad):
    with pytest.raises((RuntimeError, ValueError)) as expected:
        linear(12, 5)(bad)
    with pytest.raises(type(expected.value)) as info:
        quantized(linear(12, 5), f"{mode}_from_float32")(bad)
    assert str(info.value) == str(expected.value)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_zeros_give_the_bias(rows):
    layer = quantized(linear(12, 5))
    assert torch.equal(layer(torch.zeros(rows, 12)), layer.bias.expand(rows, 5))
    without = quantized(linear(12, 5, bias=False))
    assert torch.equal(without(torch.zeros(rows, 12)), torch.zeros(rows, 5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_row_that_is_not_finite_gives_no_finite_number_and_leaves_others_alone(bad, rows):
    layer = quantized(linear(12, 5))
    x = randn(rows, 12)
    expected = layer(x)
    x[-1, 3] = bad
    y = layer(x)
    assert not torch.isfinite(y[-1]).any()
    assert torch.equal(y[:-1], expected[:-1])


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_rows_of_any_magnitude_stay_finite(magnitude):
    layer = quantized(linear(12, 5, bias=False))
    x = torch.full((2, 12), magnitude) * torch.tensor([1.0, -1.0] * 6) * 0.5
    y = layer(x)
    assert torch.isfinite(y).all()
    # Below the smallest amax of the definition a row counts as zeros; nothing else is visible at that size.
    assert ((y.double() - reference(x, layer)).abs() <= bound(x, layer) + 1e-28).all()


def test_a_row_does_not_change_with_the_rows_beside_it():
    layer = quantized(linear(32, 16))
    x = randn(9, 32)
    alone = torch.cat([layer(row) for row in x.split(2)])
    assert torch.equal(layer(x), alone)


@pytest.mark.parametrize(
    "choice", [CpuKernels(True, OneDnn, OneDnn), CpuKernels(True, Fbgemm, OneDnn, 2000), CpuKernels(False, None, None)]
)
@pytest.mark.parametrize("inner", [1, 2, 31])
def test_the_kernels_of_other_cpus_give_the_same_bits(monkeypatch, choice, inner):
    layer = linear(inner, 6)
    with torch.no_grad():
        # Rows whose codes are at most 64 and one 127 at an even place: exact even where kernels saturate.
        layer.weight.copy_(torch.rand(6, inner, generator=torch.Generator().manual_seed(1)) * 0.5)
        layer.weight[:, 0] = 1.0
        if inner > 1:
            layer.weight[:, 1] = 0.0
    quantized(layer)
    inputs = [randn(rows, inner) for rows in (1, 2, 40)]
    expected = [layer(x) for x in inputs]
    kernels.drop_layouts(layer.weight_codes)
    monkeypatch.setattr(kernels, "cpu_kernels", lambda: choice)
    for x, y in zip(inputs, expected, strict=True):
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_gradients_are_those_of_the_dequantized_layer(mode, dtype):
    layer = quantized(linear(20, 12), f"{mode}_from_{dtype}")
    plain = nn.Linear(20, 12, dtype=getattr(torch, dtype))
    plain.weight.data, plain.bias.data = layer.weight, layer.bias.detach().clone()
    x = randn(2, 3, 20).to(getattr(torch, dtype))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = randn(2, 3, 12, seed=5).to(getattr(torch, dtype))
    layer(ours).backward(grad)
    plain(theirs).backward(grad)
    # The same product of the same numbers, in another order of summing.
    unit = {"float64": 2.0**-22, "float32": 2.0**-20, "bfloat16": 2.0**-6}[dtype]
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=unit, atol=unit)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=unit, atol=unit)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_are_those_of_a_linear_map(mode):
    layer = quantized(linear(6, 4), f"{mode}_from_float32")
    x = randn(3, 6).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    # Straight through: the gradient is 2 y W, and y is a constant of x but for W itself.
    torch.testing.assert_close(first, 2 * layer(x) @ layer.weight)
    (second,) = torch.autograd.grad(first.sum(), x)
    expected = 2 * torch.ones(3, 6) @ layer.weight.t() @ layer.weight
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


def test_a_bias_that_is_frozen_gets_no_gradient_and_the_input_does():
    layer = quantized(linear(6, 4))
    layer.bias.requires_grad_(False)
    x = randn(3, 6).requires_grad_()
    layer(x).sum().backward()
    assert layer.bias.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_training_a_layer_below_works(mode):
    below, layer = linear(6, 6), quantized(linear(6, 4), f"{mode}_from_float32")
    x, target = randn(32, 6), randn(32, 4, seed=1)
    optimizer = torch.optim.SGD(below.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(below(x)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_without_gradients_no_graph_is_built():
    layer = quantized(linear(6, 4))
    with torch.no_grad():
        assert not layer(randn(2, 6).requires_grad_()).requires_grad
    assert layer(randn(2, 6)).requires_grad  # through the bias


def test_an_input_is_never_written_to():
    for shape in ((1, 12), (4, 12), (2, 3, 12)):
        x = randn(*shape)
        before = x.clone()
        layer = quantized(linear(12, 5))
        with torch.no_grad():
            layer(x)
        layer(x)
        assert torch.equal(x, before)


@pytest.mark.parametrize("mode", MODES)
def test_functional_call_uses_the_tensors_it_is_given(mode):
    layer, other = (quantized(linear(12, 5, seed=seed), f"{mode}_from_float32") for seed in (0, 1))
    x = randn(3, 12)
    given = dict(other.named_buffers()) | dict(other.named_parameters())
    before = layer(x)
    assert torch.equal(torch.func.functional_call(layer, given, (x,)), other(x))
    assert torch.equal(layer(x), before)


def test_the_bias_may_be_parametrized_after():
    layer = quantized(linear(12, 5))
    x = randn(3, 12)
    expected = layer(x)

    class Doubled(nn.Module):
        def forward(self, bias):
            return 2 * bias

    twice = copy.deepcopy(layer)
    nn.utils.parametrize.register_parametrization(twice, "bias", Doubled())
    torch.testing.assert_close(twice(x), expected + layer.bias)


@pytest.mark.parametrize("mode", MODES)
def test_conv1d_of_transformers_gives_what_it_gave_within_its_steps(mode):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer = Conv1D(10, 24)
    layer.bias.data.normal_()
    plain = copy.deepcopy(layer)
    quantized(layer, f"{mode}_from_float32")
    assert isinstance(layer, Conv1D)
    assert layer.weight.shape == (24, 10)
    assert layer.weight_codes.shape == (10, 24)
    assert layer.weight_scale.shape == (10, 1)
    x = randn(2, 3, 24)
    y = layer(x)
    plain.weight.data = layer.weight
    # 24 products, each off by half a step of the row.
    steps = x.abs().amax(-1, keepdim=True) / 254 * layer.weight.abs().sum(0)
    assert ((y - plain(x)).abs() <= steps + 1e-5).all()


@pytest.mark.parametrize("num_inner", [1, 3, 8, 17, 31, 32, 33, 40, 64])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_few_bfloat16_rows_of_any_length_run_on_weights(num_inner: int, num_rows: int) -> None:
    """PyTorch's packed kernel reads past the end of rows that are no whole number of vectors."""
    torch.manual_seed(0)
    layer = nn.Linear(num_inner, 31).bfloat16()
    x = torch.randn(num_rows, num_inner).bfloat16()
    layer = quantized(layer, "int8/weight_from_bfloat16")
    expected = x.double() @ layer.weight_codes.double().t() * layer.weight_scale.double().t() + layer.bias.double()
    # One rounding to bfloat16 at the end, and one of the product before its bias: half a unit in the 8th bit each.
    torch.testing.assert_close(layer(x).double(), expected, rtol=2**-7, atol=2**-7)


def test_weights_loaded_over_a_layer_made_in_inference_mode_are_the_ones_multiplied() -> None:
    """Tensors made in inference mode count no writes, so a kernel's layout cannot tell by itself that it is old."""
    layer, other = quantized(linear(64, 32)), quantized(linear(64, 32, seed=1))
    x = randn(5, 64)
    with torch.inference_mode():
        twin = copy.deepcopy(layer)
        twin(x)
        twin.load_state_dict(other.state_dict())
        assert torch.equal(twin(x), other(x))
