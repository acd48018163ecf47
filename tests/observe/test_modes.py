from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast import QuantizedFloat8DTypePolicy, layers
from narrowcast.observe import Summary, observe
from tests.observe.models import batch, net, train

ALWAYS = partial(observe, every=1)
FLOAT8 = ("float8", "float8/current", "float8/rowwise", "float8/block")


def decibels(expected: torch.Tensor, actual: torch.Tensor) -> float:
    error = (actual.double() - expected.double()).square().sum()
    return 10 * math.log10((expected.double().square().sum() / error).item())


def watched(model: nn.Module, steps: int) -> Summary:
    with ALWAYS(model) as watch:
        train(model, steps)
    return watch.summary()


@pytest.mark.parametrize("mode", FLOAT8)
def test_training_in_float8_gives_the_same_bits_watched_and_not(mode: str) -> None:
    alone, seen = net(f"{mode}_from_mixed_bfloat16", uses=2), net(f"{mode}_from_mixed_bfloat16", uses=2)
    expected = train(alone, 4)
    with ALWAYS(seen):
        actual = train(seen, 4)
    assert actual == expected
    assert all(torch.equal(a, b) for a, b in zip(alone.state_dict().values(), seen.state_dict().values(), strict=True))


@pytest.mark.parametrize("mode", FLOAT8)
def test_error_of_an_output_is_that_of_the_layer_as_it_runs(mode: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    model = narrowcast.apply(nn.Sequential(copy.deepcopy(layer)), f"{mode}_from_float32").eval()
    x = batch(0, rows=16)  # as many rows as are compared
    with ALWAYS(model) as watch, torch.no_grad():
        actual = model(x)
    # Sums of 256 float32 squares.
    assert watch.summary()["0", "output"].sqnr_db == pytest.approx(decibels(layer(x), actual), rel=1e-4)


def test_scale_over_time_is_the_one_in_use_in_each_step() -> None:
    policy = QuantizedFloat8DTypePolicy("mixed_bfloat16", amax_history_length=2)
    model = net({"body": policy, "head": "keep", "norm": "keep"})
    in_use = []
    model.body.register_forward_pre_hook(lambda m, args: in_use.append(m.float8_scale[0].item()))
    history = watched(model, 5)["body", "input"].history
    # In the first step nothing is stored yet: the tensor scales itself.
    assert in_use[0] == 0
    assert history[0].scale == pytest.approx(448 / history[0].amax, rel=1e-6)
    assert [point.scale for point in history[1:]] == in_use[1:]


def test_saturation_shows_where_a_stored_scale_is_too_large() -> None:
    model = net({"body": "float8_from_mixed_bfloat16", "head": "keep", "norm": "keep"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ALWAYS(model) as watch:
        for factor in (1.0, 100.0):
            model(batch(0) * factor).sum().backward()
            optimizer.step()
    first, second = watch.summary()["body", "input"].history
    assert first.saturation == 0
    assert second.saturation > 0.5
    assert second.sqnr_db < 5 < first.sqnr_db


def test_gradients_are_those_of_e5m2_and_the_rest_of_e4m3() -> None:
    summary = watched(net({"body": "float8_from_mixed_bfloat16", "head": "keep", "norm": "keep"}), 2)
    dtypes = {one.tensor: one.dtype for one in summary.observations if one.path == "body"}
    assert dtypes == {
        "input": "float8_e4m3fn",
        "weight": "float8_e4m3fn",
        "output": "bfloat16",
        "gradient": "float8_e5m2",
    }
    # Two bits of mantissa against three: 6 dB less, give or take what the distributions do.
    assert summary["body", "gradient"].sqnr_db < summary["body", "weight"].sqnr_db


def test_rows_with_scales_of_their_own_lose_less_than_one_scale() -> None:
    x = batch(0, rows=64) * torch.logspace(-6, 0, 64)[:, None]
    found = {}
    for mode in ("float8/current", "float8/rowwise"):
        model = narrowcast.apply(nn.Sequential(nn.Linear(32, 16)), f"{mode}_from_float32").eval()
        with ALWAYS(model) as watch, torch.no_grad():
            model(x)
        found[mode] = watch.summary()["0", "input"].underflow
    assert found["float8/rowwise"] < found["float8/current"] / 10


def test_weights_that_lie_the_other_way_have_the_rows_that_are_multiplied() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    turned, straight = conv1d(16, 32), nn.Linear(32, 16)
    with torch.no_grad():
        straight.weight.copy_(turned.weight.t() * torch.logspace(-3, 0, 16)[:, None])
        turned.weight.copy_(straight.weight.t())
        straight.bias.copy_(turned.bias)
    found = []
    for layer in (turned, straight):
        model = narrowcast.apply(nn.Sequential(layer), "float8/rowwise_from_float32").eval()
        with ALWAYS(model) as watch, torch.no_grad():
            model(batch(0, rows=16))
        found.append(watch.summary())
    assert found[0]["0", "weight"].sqnr_db == pytest.approx(found[1]["0", "weight"].sqnr_db, rel=1e-6)
    assert found[0]["0", "output"].sqnr_db == pytest.approx(found[1]["0", "output"].sqnr_db, rel=1e-3)


def test_attention_and_its_float8_projections_are_seen() -> None:
    torch.manual_seed(0)
    model = narrowcast.apply(nn.MultiheadAttention(32, 2, batch_first=True), "float8_from_mixed_bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ALWAYS(model) as watch:
        x = batch(0, rows=16).view(2, 8, 32)
        model(x, x, x, need_weights=False)[0].float().sum().backward()
        optimizer.step()
    assert watch.summary()["", "input"].dtype == "float8_e4m3fn"
    assert watch.summary()["", "weight"].sqnr_db > 20


def test_int8_layer_shows_its_activations_and_its_stored_weight() -> None:
    torch.manual_seed(0)
    model = narrowcast.apply(nn.Sequential(nn.Linear(64, 32)), "int8").eval()
    with ALWAYS(model) as watch, torch.no_grad():
        for step in range(2):
            model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
    summary = watch.summary()
    assert summary["0", "input"].dtype == "int8"
    assert 35 < summary["0", "input"].sqnr_db < 50  # rows of Gaussians at 8 bits: 20 log10(127 * sqrt(12) / 3) is 43
    assert summary["0", "weight"].dtype == "int8"
    assert summary["0", "weight"].num_steps == 1  # it does not change


def test_weight_only_int8_rounds_no_input() -> None:
    model = narrowcast.apply(nn.Sequential(nn.Linear(64, 32)), "int8/weight").eval()
    with ALWAYS(model) as watch, torch.no_grad():
        model(torch.randn(8, 64))
    assert watch.summary()["0", "input"].sqnr_db is None
    assert watch.summary()["0", "weight"].dtype == "int8"


@pytest.mark.parametrize(("mode", "is_rounded"), [("float8/dynamic", True), ("float8/weight", False)])
def test_weights_stored_as_float8_are_seen_once(mode: str, is_rounded: bool) -> None:
    model = narrowcast.apply(nn.Sequential(nn.Linear(64, 32)), mode).eval()
    with ALWAYS(model) as watch, torch.no_grad():
        for _ in range(2):
            model(torch.randn(8, 64))
    summary = watch.summary()
    assert (summary["0", "weight"].dtype, summary["0", "weight"].num_steps) == ("float8_e4m3fn", 1)
    assert (summary["0", "input"].sqnr_db is not None) is is_rounded


def test_frozen_scale_of_an_input_is_the_one_that_training_left() -> None:
    model = narrowcast.apply(nn.Sequential(nn.Linear(32, 16)), "float8_from_float32")
    train(model, 3)
    scale = model[0].float8_scale[0].item()
    narrowcast.apply(model, "float8/static").eval()
    with ALWAYS(model) as watch, torch.no_grad():
        model(batch(0))
    assert watch.summary()["0", "input"].history[0].scale == pytest.approx(scale, rel=1e-6)


def test_a_layer_with_a_core_shows_what_the_same_module_of_pytorch_shows() -> None:
    core, layer = nn.Linear(16, 8), layers.Dense(8)
    layer.build((None, 16))
    layer.core.load_state_dict(core.state_dict())
    found = []
    for model in (nn.Sequential(core), nn.Sequential(layer)):
        narrowcast.apply(model, "float8_from_mixed_bfloat16")
        with ALWAYS(model) as watch:
            model(torch.linspace(-1, 1, 64).reshape(4, 16)).float().square().sum().backward()
        found.append(watch.summary().observations)
    assert [one.tensor for one in found[1]] == ["input", "weight", "output", "gradient"]
    assert found[1] == found[0]
