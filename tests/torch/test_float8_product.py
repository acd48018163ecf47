"""Products in float8 against the same products written out with the codes of numerics, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowcast.numerics import float8, scaling
from narrowcast.torch import float8_gemm, float8_product

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 129, 31), (130, 64, 260)]


def randn(*shape, seed=0, factor=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * factor


def rounded(x, scale, dtype):
    """`x` through its codes, float64: what numerics says each value becomes."""
    codes = float8.quantize(x, scale, dtype)
    return codes.to(torch.float64) / scale.to(torch.float64)


def by_tensor(x, dtype):
    return rounded(x, scaling.saturating_scale(scaling.amax(x, (0, 1)), float8.largest(dtype))[0], dtype)


def along(axis):
    def of(x, dtype):
        return rounded(x, scaling.saturating_scale(scaling.amax(x, axis), float8.largest(dtype))[0], dtype)

    return of


def blocks(sizes):
    def of(x, dtype):
        scale = scaling.saturating_scale(scaling.block_amax(x, sizes), float8.largest(dtype))[0]
        return rounded(x, scaling.expand_blocks(scale, sizes, tuple(x.shape)), dtype)

    return of


# For each recipe, how x, weight and gradient are rounded: forward; for the input's gradient; for the weight's.
RECIPES = {
    "by_tensor": (by_tensor, by_tensor, by_tensor, by_tensor, by_tensor, by_tensor),
    "by_row": (along(1), along(1), along(1), along(0), along(0), along(0)),
    "block": (
        blocks((1, 128)),
        blocks((128, 128)),
        blocks((1, 128)),
        blocks((128, 128)),
        blocks((128, 1)),
        blocks((128, 1)),
    ),
}


def tensors(rows, inner, out):
    x = randn(rows, inner, seed=1, factor=3.0).requires_grad_()
    weight = randn(out, inner, seed=2, factor=0.1).requires_grad_()
    bias = randn(out, seed=3).requires_grad_()
    return x, weight, bias, randn(rows, out, seed=4, factor=1e-3)


def assert_close(actual, exact, scale_of_terms, unit=2.0**-24):
    # A float32 sum of n terms is within n units of its terms' magnitude; factors and bias add a few more roundings.
    num_terms = scale_of_terms.shape[-1] if scale_of_terms.dim() else 1
    tolerance = unit * (num_terms + 8) * scale_of_terms.sum(-1) if scale_of_terms.dim() else scale_of_terms
    assert (actual.to(torch.float64) - exact).abs().le(tolerance + 1e-30).all()


def bound(a, b):
    """Magnitudes of the terms of `a @ b`, last axis summed over: shape (rows, columns, terms)."""
    return (a.abs().unsqueeze(1) * b.abs().t().unsqueeze(0)).detach()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_products_of_rounded_tensors(recipe, shape):
    x, weight, bias, grad = tensors(*shape)
    y = getattr(float8_product, recipe)(x, weight, bias, torch.float32)
    y.backward(grad)
    x_f, w_f, g_x, w_x, g_w, x_w = RECIPES[recipe]
    xq, wq = x_f(x.detach(), E4M3), w_f(weight.detach(), E4M3)
    exact = xq @ wq.t() + bias.detach().double()
    terms = torch.cat([bound(xq, wq.t()), bias.detach().abs().double().expand(shape[0], -1).unsqueeze(-1)], -1)
    assert_close(y.detach(), exact, terms)
    gq, wq = g_x(grad, E5M2), w_x(weight.detach(), E4M3)
    assert_close(x.grad, gq @ wq, bound(gq, wq))
    gq, xq = g_w(grad, E5M2), x_w(x.detach(), E4M3)
    assert_close(weight.grad, gq.t() @ xq, bound(gq.t(), xq))
    assert_close(bias.grad, grad.double().sum(0), grad.abs().double().t())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_wide_gradient_is_multiplied_without_float8(recipe):
    x, weight, bias, grad = tensors(64, 32, 48)
    y = getattr(float8_product, recipe)(x, weight, bias, torch.float32, wide_gradient=True)
    y.backward(grad)
    exact = grad.double().t() @ x.detach().double()
    assert_close(weight.grad, exact, bound(grad.double().t(), x.detach().double()))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_results_have_the_dtype_asked_and_gradients_that_of_their_tensor(recipe, dtype):
    x, weight, bias, grad = tensors(9, 32, 16)
    x = x.detach().to(dtype).requires_grad_()
    y = getattr(float8_product, recipe)(x, weight, bias, dtype)
    assert y.dtype is dtype
    y.backward(grad.to(dtype))
    assert (x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (dtype, torch.float32, torch.float32)
    wide = getattr(float8_product, recipe)(x.detach().float(), weight.detach(), bias.detach(), torch.float32)
    # One rounding to the result's dtype.
    torch.testing.assert_close(y.float(), wide, rtol=2.0**-8 if dtype is torch.bfloat16 else 2.0**-11, atol=1e-7)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden_by_clipping(recipe, value):
    x, weight, bias, grad = tensors(4, 8, 8)
    x.data[1, 2] = value
    y = getattr(float8_product, recipe)(x, weight, bias, torch.float32)
    assert y[1].isnan().all()
    grad[2, 3] = value
    y.backward(grad)
    assert x.grad[2].isnan().all()
    assert weight.grad.isnan().any()


def test_an_infinity_that_a_stored_scale_clips_is_not_hidden():
    x, weight, bias, grad = tensors(4, 8, 8)
    x.data[1, 2] = np.inf
    y = float8_product.by_tensor(x, weight, bias, torch.float32, stored=torch.tensor([100.0, 100.0, 100.0]))
    assert y.isnan().all()
    y.backward(grad)
    assert weight.grad.isnan().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("recipe", ["by_row", "block"])
def test_other_rows_do_not_suffer_from_one_that_is_not_finite(recipe):
    x, weight, bias, _ = tensors(4, 8, 8)
    clean = getattr(float8_product, recipe)(x, weight, bias, torch.float32)
    x.data[1, 2] = np.inf
    y = getattr(float8_product, recipe)(x, weight, bias, torch.float32)
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_give_zeros(recipe):
    zeros = torch.zeros(4, 8, requires_grad=True)
    weight = torch.zeros(16, 8, requires_grad=True)
    y = getattr(float8_product, recipe)(zeros, weight, None, torch.float32)
    y.backward(torch.zeros(4, 16))
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (y, zeros.grad, weight.grad))


def test_tiny_values_keep_zeros_and_stay_finite():
    x = torch.tensor([[1e-37, 0.0], [0.0, -1e-38]])
    y = float8_product.by_tensor(x, torch.tensor([[1e-3, 0.0], [0.0, 1e3]]), None, torch.float32)
    assert y.isfinite().all()
    assert y[0, 1] == 0
    assert y[1, 0] == 0


@pytest.mark.parametrize("factors", [(1e25, 1e25, 1.0), (1e10, 1.0, 1e37), (1e-19, 1e-19, 1e3)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_factors_whose_product_is_no_float32_are_applied_all_the_same(recipe, factors):
    x, weight, _, grad = (tensor.detach() for tensor in tensors(4, 8, 8))
    x, weight, grad = ((tensor / tensor.abs().max()) * f for tensor, f in zip((x, weight, grad), factors, strict=True))
    x.requires_grad_(), weight.requires_grad_()
    y = getattr(float8_product, recipe)(x, weight, None, torch.float32)
    y.backward(grad)
    x_f, w_f, g_x, w_x, g_w, x_w = RECIPES[recipe]
    x, weight, x_grad, weight_grad = x.detach(), weight.detach(), x.grad, weight.grad
    for actual, exact in (
        (y.detach(), x_f(x, E4M3) @ w_f(weight, E4M3).t()),
        (x_grad, g_x(grad, E5M2) @ w_x(weight, E4M3)),
        (weight_grad, g_w(grad, E5M2).t() @ x_w(x, E4M3)),
    ):
        overflows = exact.abs() > torch.finfo(torch.float32).max
        assert not actual[overflows].isfinite().any()
        # Sums of eight terms of both signs: a few units of float32 of the largest, or of the smallest subnormal.
        bound = 2.0**-20 * exact[~overflows].abs().max() + 2.0**-145 if not overflows.all() else 0.0
        assert (actual.double() - exact)[~overflows].abs().le(bound).all()


def test_columns_that_lie_as_inputs_first_give_the_same():
    x, weight, bias, grad = tensors(9, 32, 16)
    y = float8_product.by_tensor(x, weight, bias, torch.float32)
    transposed = weight.detach().t().contiguous().requires_grad_()
    other = float8_product.by_tensor(x, transposed.t(), bias, torch.float32)
    torch.testing.assert_close(other, y, rtol=1e-6, atol=1e-6)  # the order of the float32 sum
    y.backward(grad)
    other.backward(grad)
    torch.testing.assert_close(transposed.grad.t(), weight.grad, rtol=1e-5, atol=1e-9)


@pytest.fixture
def real(monkeypatch):
    """The CPU's `torch._scaled_mm`, which is emulated and slow, in place of a GPU's."""
    monkeypatch.setitem(float8_gemm._REAL_DEVICES, "cpu", True)
    used = []
    monkeypatch.setattr(
        float8_gemm.Real,
        "quantize",
        lambda self, *a, __of=float8_gemm.Real.quantize, **k: used.append(1) or __of(self, *a, **k),
    )
    return used


@pytest.mark.parametrize("shape", [(32, 64, 48), (7, 16, 32)], ids=str)
@pytest.mark.parametrize(
    "recipe, dtype", [("by_tensor", torch.float32), ("by_tensor", torch.bfloat16), ("by_row", torch.bfloat16)]
)
def test_real_float8_gemms_multiply_the_same_values(real, monkeypatch, recipe, dtype, shape):
    x, weight, bias, grad = tensors(*shape)
    results = []
    for is_real in (True, False):
        monkeypatch.setitem(float8_gemm._REAL_DEVICES, "cpu", is_real)
        for tensor in (x, weight, bias):
            tensor.grad = None
        y = getattr(float8_product, recipe)(x.to(dtype), weight, bias.to(dtype), dtype)
        y.backward(grad.to(dtype))
        results.append((y.detach(), x.grad, weight.grad))
    assert real
    for one, other in zip(*results, strict=True):
        # Both round a float32 sum to the result's dtype once; the sums differ in their order.
        unit = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-20
        torch.testing.assert_close(one, other, rtol=unit, atol=unit * other.abs().max().item())


def test_shapes_that_a_real_gemm_refuses_are_emulated(real):
    x, weight, bias, _ = tensors(8, 24, 16)
    float8_product.by_tensor(x, weight, bias, torch.float32)
    assert not real


def test_multiplying_in_bfloat16_gives_the_values_within_its_roundings(monkeypatch):
    x, weight, bias, grad = tensors(9, 32, 16)
    results = []
    for engine in (float8_gemm.WIDE, float8_gemm.SCALED_OUTPUT):
        monkeypatch.setattr(float8_product, "engine_for", lambda *_, engine=engine, **__: engine)
        for tensor in (x, weight, bias):
            tensor.grad = None
        y = float8_product.by_tensor(x, weight, bias, torch.bfloat16)
        y.backward(grad.bfloat16())
        results.append((y.detach().float(), x.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        # The product is rounded to bfloat16, then scaled, then rounded again.
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-7 * other.abs().max().item())
