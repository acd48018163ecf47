"""float8 at each kind of layer, and what the plan says of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.torch import float8_gemm
from tests.torch.models import tiny_lm
from tests.torch.test_float8_state import randn, sgd

MODES = ("float8", "float8/current", "float8/rowwise", "float8/block")


@pytest.mark.parametrize("mode", [*MODES, "float8/dynamic", "float8/weight"])
def test_conv1d_of_hugging_face_computes_what_a_linear_layer_does(mode):
    from transformers.pytorch_utils import Conv1D

    transposed, linear = Conv1D(24, 16), nn.Linear(16, 24)
    nn.init.normal_(transposed.bias)
    linear.weight.data = transposed.weight.data.t().contiguous()
    linear.bias.data = transposed.bias.data.clone()
    results = []
    for layer in (transposed, linear):
        narrowcast.apply(layer, mode)
        x = randn(2, 5, 16).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # the order of the float32 sums
    if mode in MODES:
        torch.testing.assert_close(transposed.weight.grad.t(), linear.weight.grad, rtol=1e-5, atol=1e-5)


def test_static_conv1d_computes_what_the_trained_one_does():
    from transformers.pytorch_utils import Conv1D

    layer = narrowcast.apply(Conv1D(24, 16), "float8")
    layer(randn(5, 16)).square().sum().backward()
    sgd(layer).step()
    layer.eval()
    x = randn(3, 16, seed=4)
    with torch.no_grad():
        expected = layer(x)
        narrowcast.apply(layer, "float8/static")
        # The codes lie the other way round, so the float32 sums may take another order.
        torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_the_same_objects_so_an_optimizer_stays_valid(mode):
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = sgd(model)
    before = model[0].weight
    narrowcast.apply(model, mode)
    assert model[0].weight is before
    value = before.detach().clone()
    model(randn(3, 16)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, value)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_arrive_in_the_variable_dtype_and_outputs_in_the_compute_dtype(mode):
    layer = narrowcast.apply(nn.Linear(16, 16), f"{mode}_from_mixed_bfloat16")
    x = randn(3, 16).requires_grad_()
    y = layer(x)
    y.float().sum().backward()
    assert (y.dtype, layer.weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_with_a_wide_weight_gradient_rounds_neither_factor_of_it(mode):
    exact, errors = None, []
    for is_wide in (True, False):
        torch.manual_seed(0)
        policy = narrowcast.QuantizedFloat8DTypePolicy(
            mode=mode, source_name="float32", high_precision_weight_gradient=is_wide
        )
        layer = narrowcast.apply(nn.Linear(32, 16), policy)
        x, grad = randn(64, 32), randn(64, 16, seed=1)
        layer(x).backward(grad)
        exact = grad.double().t() @ x.double()
        errors.append(((layer.weight.grad.double() - exact).norm() / exact.norm()).item())
    # 64 float32 terms: at most 64 units of 2**-24. Two roundings to float8, of 2**-4 and 2**-3 at most, lose far more.
    assert errors[0] < 64 * 2.0**-24
    assert errors[1] > 1e-3


def test_attention_is_two_float8_products_around_the_same_softmax():
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    into, out = nn.Linear(16, 48), nn.Linear(16, 16)
    into.load_state_dict({"weight": attention.in_proj_weight, "bias": attention.in_proj_bias})
    out.load_state_dict(attention.out_proj.state_dict())
    x = randn(3, 5, 16)
    plain = attention(x, x, x, need_weights=False)[0]
    for module in (attention, into, out):
        narrowcast.apply(module, "float8/current")
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in into(x).chunk(3, -1))
    heads = ((q @ k.transpose(-1, -2)) / 8**0.5).softmax(-1) @ v
    expected = out(heads.transpose(1, 2).flatten(2))
    # A sum in another order may move a value of the second product's input over a boundary of float8: one step of
    # e4m3, 2**-3 of that value at most, in a sum of 16.
    found = attention(x, x, x, need_weights=False)[0]
    assert (found - expected).norm() < 2.0**-7 * expected.norm()
    assert (found - plain).norm() > 2.0**-7 * expected.norm()

    layer = narrowcast.apply(nn.Linear(16, 16), "float8")
    x = randn(3, 16).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_a_weight_that_is_parametrized_afterwards_is_the_one_that_is_multiplied():
    layer = narrowcast.apply(nn.Linear(16, 16), "float8")
    nn.utils.parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original0.data.mul_(2.0)
    doubled = layer(randn(3, 16)) - layer.bias
    layer.parametrizations.weight.original0.data.div_(2.0)
    torch.testing.assert_close(doubled, 2 * (layer(randn(3, 16)) - layer.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["float8", "float8/current", "float8/static", "float8/dynamic"])
def test_the_plan_says_how_many_bytes_the_state_dict_will_have(mode):
    model = tiny_lm(num_blocks=1)
    rules = {r"blocks/0/(attention|up)": mode}
    if mode == "float8/static":
        narrowcast.apply(model, dict.fromkeys(rules, "float8"))
    bound = narrowcast.plan(model, rules)
    if mode == "float8/static":
        model.train()(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
        sgd(model).step()
    narrowcast.apply(model, rules)
    for path in ("blocks/0/attention", "blocks/0/up"):
        module = model.get_submodule(path.replace("/", "."))
        expected = sum(tensor.nbytes for tensor in module.state_dict().values())
        # The frozen scales of inputs, one float32 a product, are not counted.
        slack = 16 if mode == "float8/static" else 0
        assert 0 <= expected - bound[path].bytes_after <= slack


def words(layer, policy):
    row = narrowcast.plan(nn.Sequential(layer), {"0": policy})["0"]
    return row.kernel, row.reason


def test_the_plan_says_what_is_emulated_and_what_does_not_pay(monkeypatch):
    kernel, reason = words(nn.Linear(64, 64), "float8")
    assert kernel == "float8 values, float32 gemm"
    assert reason == "emulated: slower than without float8, which this device has no gemm for"
    # As if this were a device with float8 GEMMs.
    monkeypatch.setitem(float8_gemm._REAL_DEVICES, "cpu", True)
    with torch.device("meta"):
        large, odd, small = nn.Linear(4096, 4096), nn.Linear(4096, 100), nn.Linear(64, 64)
    monkeypatch.setitem(float8_gemm._REAL_DEVICES, "meta", True)
    assert words(large, "float8_from_mixed_bfloat16") == ("float8 gemm", "")
    assert words(odd, "float8")[1].startswith(
        "emulated: a float8 gemm takes multiples of 16, and this layer is (100, 4096)"
    )
    assert words(small, "float8_from_bfloat16")[1] == "may be slower than bfloat16: fewer than 4,194,304 weights"
    assert words(large, "float8/rowwise")[1] == (
        "emulated: float8 gemms by row give bfloat16, and this layer computes in float32"
    )
    assert words(large, "float8/block")[1].startswith("emulated: slower than without float8")
    assert words(large, "float8_from_float64")[1] == (
        "emulated: float8 gemms give float32 at most, and this layer computes in float64"
    )
