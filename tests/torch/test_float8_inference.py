"""float8 for inference: weights stored as float8, activations by frozen scales, by their own, or as they are."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import narrowcast
from narrowcast.errors import PlanError, WeightError
from narrowcast.numerics import float8, scaling, stored_form
from narrowcast.torch import float8_scheme, gemm
from tests.torch.models import tiny_lm
from tests.torch.test_float8_state import randn, sgd

MODES = ("float8/dynamic", "float8/weight")
PROJECTIONS = r"blocks/\d+/(attention|up|down)"


def trained(model, steps=3, mode="float8", path=".*"):
    """A model that took some steps in float8."""
    narrowcast.apply(model, mode if path == ".*" else {path: mode})
    optimizer = sgd(model)
    for seed in range(steps):
        x = randn(4, 16, seed=seed)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def lm(steps=2):
    model = narrowcast.apply(tiny_lm(num_blocks=1).train(), {PROJECTIONS: "float8"})
    optimizer = sgd(model)
    for seed in range(steps):
        ids = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(seed))
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


IDS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(9))


# Static


@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16"])
def test_static_computes_what_the_trained_layer_computes_in_eval_mode(source):
    model = trained(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), mode=f"float8_from_{source}").eval()
    x = randn(5, 16, seed=7)
    with torch.no_grad():
        expected = model(x)
        narrowcast.apply(model, "float8/static")
        assert torch.equal(model(x), expected)
    assert model[0].dtype_policy.name == f"float8/static_from_{source}"


def test_static_attention_computes_what_the_trained_one_computes():
    model = lm()
    with torch.no_grad():
        expected = model(IDS)
        narrowcast.apply(model, {PROJECTIONS: "float8/static"})
        assert torch.equal(model(IDS), expected)
    layer = model.blocks[0].attention
    assert layer.in_proj_weight_codes.dtype is layer.out_proj.weight_codes.dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("separate", [False, True], ids=["packed", "separate"])
def test_static_attention_over_another_source_has_a_scale_for_each_product(separate):
    options = {"kdim": 8, "vdim": 12} if separate else {}
    model = narrowcast.apply(nn.MultiheadAttention(16, 2, batch_first=True, **options), "float8")
    optimizer = sgd(model)
    q, k = randn(2, 3, 16, seed=1), randn(2, 5, 8 if separate else 16, seed=2, factor=0.5)
    v = randn(2, 5, 12, seed=3, factor=100.0) if separate else k
    model(q, k, v)[0].square().sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        expected = model(q, k, v)[0]
        narrowcast.apply(model, "float8/static")
        actual = model(q, k, v)[0]
    assert len(set(model.float8_input_scale.tolist())) == (3 if separate else 2)
    if separate:
        assert torch.equal(actual, expected)
    else:
        # Two products used parts of one weight, which is stored with one scale: two roundings to float8 apart.
        assert (actual - expected).norm() < 0.1 * expected.norm()


def test_static_needs_training():
    with pytest.raises(
        PlanError, match="takes its scales from training in the mode float8, which this layer has not had"
    ):
        narrowcast.apply(nn.Linear(16, 16), "float8/static")
    with pytest.raises(PlanError, match="takes its scales from training"):
        narrowcast.apply(trained(nn.Linear(16, 16), mode="float8/current"), "float8/static")
    untrained = narrowcast.apply(nn.Linear(16, 16), "float8")
    with pytest.raises(WeightError, match=r"has not moved on with a training step.*Train it in the mode float8 first"):
        narrowcast.apply(untrained, "float8/static")
    assert untrained.dtype_policy.name == "float8_from_float32"


def test_training_state_is_gone_from_stored_layers():
    for mode in ("float8/static", *MODES):
        model = narrowcast.apply(trained(nn.Linear(16, 16)), mode)
        expected = {"weight_codes", "weight_scale", "bias"} | ({"float8_input_scale"} if "static" in mode else set())
        assert set(model.state_dict()) == expected
        assert not any(name.startswith("_float8") for name in model.__dict__)


# Dynamic and weights


def layer_and_input(mode, source="float32", rows=5):
    torch.manual_seed(0)
    layer = nn.Linear(48, 32)
    x = randn(rows, 48, seed=3) * torch.logspace(-3, 3, rows).unsqueeze(1)
    plain = copy.deepcopy(layer)
    return narrowcast.apply(layer, f"{mode}_from_{source}"), plain, x


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_the_codes_of_numerics(mode):
    layer, plain, _ = layer_and_input(mode)
    parts = stored_form.of(mode).encode(plain.weight.detach())
    assert torch.equal(layer.weight_codes.view(torch.uint8), parts["codes"].view(torch.uint8))
    assert torch.equal(layer.weight_scale, parts["scale"])
    assert torch.equal(layer.weight, float8.decode(parts))


def test_dynamic_rounds_each_row_as_numerics_says():
    layer, _, x = layer_and_input("float8/dynamic")
    scale, _ = scaling.saturating_scale(scaling.amax(x, 1), 448.0)
    rounded = float8.quantize(x, scale).double() / scale.double()
    weight = layer.weight_codes.double() * layer.weight_scale.double()
    exact = rounded @ weight.t() + layer.bias.detach().double()
    # A float32 sum of 48 terms and a few roundings of factors.
    bound = 2.0**-24 * 60 * (rounded.abs() @ weight.abs().t() + layer.bias.detach().abs())
    assert ((layer(x).detach() - exact).abs() <= bound).all()


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "mixed_bfloat16"])
def test_weight_multiplies_by_the_dequantized_weight(source):
    layer, _, x = layer_and_input("float8/weight", source)
    compute = getattr(torch, layer.dtype_policy.compute_dtype)
    weight = layer.weight_codes.double() * layer.weight_scale.double()
    exact = x.to(compute).double() @ weight.t() + layer.bias.detach().double()
    unit = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-9}[compute]
    y = layer(x)
    assert y.dtype is compute
    bound = unit * (x.double().abs() @ weight.abs().t() + layer.bias.detach().double().abs())
    assert ((y.detach().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_error_is_that_of_float8(mode):
    layer, plain, x = layer_and_input(mode)
    error = (layer(x) - plain(x)).norm(dim=1) / plain(x).norm(dim=1)
    # Half a step of 3 bits of mantissa is at most 1/16; errors of 48 terms average out to less.
    assert (error < 0.06).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(value):
    layer, _, x = layer_and_input("float8/dynamic")
    clean = layer(x)
    x[2, 5] = value
    y = layer(x)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_one_through_the_dequantized_weight(mode):
    layer, _, x = layer_and_input(mode)
    x.requires_grad_()
    grad = randn(5, 32, seed=5)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.weight.detach(), rtol=1e-5, atol=1e-6)  # the order of the sum
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_give_the_same_with_and_without_gradients(mode):
    torch.compiler.reset()
    layer, _, x = layer_and_input(mode)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(call(x), layer(x), rtol=1e-6, atol=1e-6)
    plain, traced = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(plain).square().sum().backward()
    call(traced).square().sum().backward()
    scale = plain.grad.abs().max().item()
    torch.testing.assert_close(traced.grad, plain.grad, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("mode", ["float8/static", *MODES])
def test_a_saved_model_reloads_bit_equal_and_takes_a_quarter(mode, tmp_path):
    model = lm()
    narrowcast.apply(model, {PROJECTIONS: mode})
    with torch.no_grad():
        expected = model(IDS)
        narrowcast.save(model, tmp_path)
        fresh = narrowcast.load(tiny_lm(seed=5, num_blocks=1), tmp_path)
        assert torch.equal(fresh(IDS), expected)
    assert fresh.blocks[0].up.weight_codes.dtype is torch.float8_e4m3fn
    saved, up = load_file(tmp_path / "model.safetensors"), tiny_lm(num_blocks=1).blocks[0].up
    of_weight = [tensor for name, tensor in saved.items() if name.startswith("blocks.0.up.weight")]
    # A byte a weight, and at most one float32 scale a row.
    assert sum(tensor.nbytes for tensor in of_weight) <= up.weight.nbytes // 4 + 4 * up.weight.shape[0]


@pytest.mark.parametrize("mode", ["float8/static", *MODES])
def test_dequantizing_gives_the_floats_that_were_multiplied(mode):
    model = narrowcast.apply(trained(nn.Sequential(nn.Linear(16, 16))), mode)
    weight = model[0].weight.clone()
    narrowcast.dequantize(model)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48), (48,), (2, 3, 48)], ids=str)
def test_any_leading_axes_will_do(mode, shape):
    layer, plain, _ = layer_and_input(mode)
    assert layer(randn(*shape)).shape == plain(randn(*shape)).shape


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_is_not_finite_is_refused(mode):
    layer = nn.Sequential(nn.Linear(4, 4))
    layer[0].weight.data[1, 1] = torch.nan
    with pytest.raises(WeightError, match="holds NaN or infinity"):
        narrowcast.apply(layer, mode)


def test_the_plan_says_that_it_is_emulated_here():
    row = narrowcast.plan(nn.Sequential(nn.Linear(16, 16)), "float8/dynamic")["0"]
    assert row.kernel == "float8 values, float32 gemm, each row of activations rounded as it comes"
    assert row.reason == "smaller, not faster: float8 is emulated"
    assert row.bytes_after == 16 * 16 + 16 * 4 + 16 * 4


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_plan_says_what_multiplies_on_cpus_with_and_without_bfloat16(is_slow, monkeypatch):
    for module in (gemm, float8_scheme):
        monkeypatch.setattr(module, "SLOW_ON_CPU", frozenset({torch.bfloat16} if is_slow else ()))
    layer = nn.Sequential(nn.Linear(16, 16))
    kernel = narrowcast.plan(layer, "float8/weight_from_mixed_bfloat16")["0"].kernel
    assert kernel.startswith("float32 gemm rounded to bfloat16" if is_slow else "bfloat16 gemm, on weights made floats")
    kernel = narrowcast.plan(layer, "float8/dynamic_from_mixed_bfloat16")["0"].kernel
    assert kernel.startswith("float8 values, float32 gemm" if is_slow else "float8 values, bfloat16 gemm")
