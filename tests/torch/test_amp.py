"""The loss scaler: PyTorch's own steps, and the gaps that it closes."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.errors import LossScaleError
from narrowcast.torch.amp import GradScaler

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "loss_scale_vectors.json").read_text("utf-8"))


def setup(**options):
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    return weight, optimizer, GradScaler("cpu", **options)


def one_step(weight, optimizer, scaler, *, is_finite=True, update=True):
    scaler.scale(weight.sum()).backward()
    if not is_finite:
        weight.grad[1] = math.inf
    taken = scaler.step(optimizer)
    if update:
        scaler.update()
    optimizer.zero_grad()
    return taken


def trace(flags, **options):
    weight, optimizer, scaler = setup(**options)
    rows = []
    for flag in flags:
        taken = one_step(weight, optimizer, scaler, is_finite=bool(flag))
        rows.append([scaler.get_scale(), scaler._get_growth_tracker(), int(taken)])
    return rows


def test_the_scale_follows_that_of_pytorch():
    expected = VECTORS["torch_GradScaler(init 2**16)"]["scale_tracker_stepped"]
    assert trace(VECTORS["finite_flags"], growth_interval=VECTORS["growth_interval"]) == expected


def test_the_scale_has_a_floor_as_in_tensorflow():
    case = VECTORS["tf_LossScaleOptimizer(init 4; floor 1)"]
    rows = trace(case["finite_flags"], init_scale=4.0, growth_interval=VECTORS["growth_interval"])
    assert rows == case["scale_counter_stepped"]


def test_gradients_arrive_as_without_scaling():
    weight, optimizer, scaler = setup()
    assert one_step(weight, optimizer, scaler) is True
    assert torch.equal(weight.detach(), torch.full((4,), 0.875))


def test_a_skipped_step_says_so_and_changes_nothing():
    weight, optimizer, scaler = setup()
    assert one_step(weight, optimizer, scaler, is_finite=False) is False
    assert torch.equal(weight.detach(), torch.ones(4))


def test_a_fused_optimizer_that_skips_says_so_too():
    weight = nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.AdamW([weight], lr=0.125, fused=True), GradScaler("cpu")
    assert one_step(weight, optimizer, scaler, is_finite=False) is False
    assert torch.equal(weight.detach(), torch.ones(4))
    assert one_step(weight, optimizer, scaler) is True
    assert not torch.equal(weight.detach(), torch.ones(4))


def test_clipping_comes_after_unscaling():
    weight, optimizer, scaler = setup(init_scale=1024.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_([weight], 1.0) == 2.0
    assert scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - 0.125 / 2))


def test_the_scale_does_not_become_infinite():
    rows = trace([1] * 4, init_scale=2.0**126, growth_interval=1)
    assert [row[0] for row in rows] == [2.0**127] * 4


def test_a_scheduler_follows_the_steps_that_were_taken():
    weight, optimizer, scaler = setup()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of a scheduler ahead of its optimizer
        for is_finite in (False, True, False, True):
            if one_step(weight, optimizer, scaler, is_finite=is_finite):
                scheduler.step()
    assert scheduler.last_epoch == 2


def test_accumulated_micro_batches_share_one_scale_and_one_decision():
    weight, optimizer, scaler = setup()
    for _ in range(3):
        scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.full((4,), 1 - 3 * 0.125))


def test_two_optimizers_skip_by_themselves_and_back_off_together():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scaler = GradScaler("cpu")
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    weights[0].grad[0] = math.nan
    assert [scaler.step(optimizer) for optimizer in optimizers] == [False, True]
    scaler.update()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("parameters", ["some", "none"])
def test_parameters_without_gradients_do_no_harm(parameters):
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([used, unused], lr=0.5), GradScaler("cpu")
    scaler.scale((used if parameters == "some" else nn.Parameter(torch.ones(1))).sum()).backward()
    assert scaler.step(optimizer) is True
    scaler.update()
    assert unused.item() == 1.0
    assert used.item() == (0.5 if parameters == "some" else 1.0)


def test_growth_goes_on_after_restoring_with_a_shorter_interval():
    weight, optimizer, scaler = setup(growth_interval=100)
    for _ in range(10):
        one_step(weight, optimizer, scaler)
    state = {**scaler.state_dict(), "growth_interval": 5}
    plain = torch.amp.GradScaler("cpu")
    for restored, grows in ((setup()[2], True), (plain, False)):
        restored.load_state_dict(state)
        for _ in range(3):
            restored.scale(weight.sum()).backward()
            restored.step(optimizer)
            restored.update()
        assert (restored.get_scale() > 2.0**16) is grows  # PyTorch's own never grows again


def test_growth_goes_on_after_the_interval_is_shortened():
    weight, optimizer, scaler = setup(growth_interval=100)
    for _ in range(10):
        one_step(weight, optimizer, scaler)
    scaler.set_growth_interval(3)
    one_step(weight, optimizer, scaler)
    assert scaler.get_scale() == 2.0**17


@pytest.mark.parametrize(
    "scale, expected", [(0.0, 1.0), (0.25, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1e39, 1.0), (8.0, 8.0)]
)
def test_a_state_that_went_astray_is_brought_back(scale, expected):
    state = {**GradScaler("cpu").state_dict(), "scale": scale}
    before = dict(state)
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == expected
    assert str(state) == str(before)


def test_states_are_exchanged_with_pytorch():
    weight, optimizer, scaler = setup(growth_interval=7)
    one_step(weight, optimizer, scaler)
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(scaler.state_dict())
    assert plain.state_dict() == scaler.state_dict()
    again = GradScaler("cpu")
    again.load_state_dict(plain.state_dict())
    assert again.state_dict() == plain.state_dict()


def test_a_scaler_is_pickled_between_steps():
    weight, optimizer, scaler = setup(floor=2.0)
    one_step(weight, optimizer, scaler)
    twin = pickle.loads(pickle.dumps(scaler))
    assert twin.state_dict() == scaler.state_dict()
    assert one_step(weight, optimizer, twin)


def test_a_disabled_scaler_passes_everything_through():
    weight, optimizer, scaler = setup(enabled=False)
    assert scaler.scale(weight) is weight
    weight.sum().backward()
    assert scaler.step(optimizer) is True
    scaler.update()
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


@pytest.mark.parametrize(
    "options, text",
    [
        ({"init_scale": 0.0}, r"Got init_scale=0.0\. Expected a number above 0, from 1\.18e-38 to 3\.4e\+38"),
        ({"init_scale": 1e39}, r"init_scale=1e\+39"),
        ({"init_scale": -1.0}, "init_scale=-1.0"),
        ({"init_scale": math.nan}, "init_scale=nan"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"init_scale": "1024"}, "init_scale='1024'"),
        ({"growth_factor": 1.0}, r"growth_factor=1.0\. Expected a finite number above 1"),
        ({"growth_factor": math.inf}, "growth_factor=inf"),
        ({"backoff_factor": 1.0}, r"backoff_factor=1.0\. Expected a number between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"growth_interval": 0}, r"growth_interval=0\. Expected an integer of at least 1"),
        ({"growth_interval": 2.5}, "growth_interval=2.5"),
        ({"growth_interval": True}, "growth_interval=True"),
        ({"floor": 0.0}, "floor=0.0"),
        ({"floor": 1e-46}, "floor=1e-46"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(options, text):
    with pytest.raises(LossScaleError, match=text):
        GradScaler("cpu", **options)


def test_settings_may_be_numbers_of_numpy():
    scaler = GradScaler("cpu", np.float32(4.0), np.float64(2.0), np.float32(0.5), np.int64(3))
    assert scaler.state_dict() == GradScaler("cpu", 4.0, 2.0, 0.5, 3).state_dict()


def test_float16_gradients_are_refused_with_the_policy_that_keeps_them_wide():
    layer = narrowcast.apply(nn.Linear(4, 4), "float16")
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 4)).float().sum()).backward()
    with pytest.raises(LossScaleError, match=r"Gradients are float16 .* apply 'mixed_float16' in place of 'float16'"):
        scaler.step(optimizer)


def test_a_scaler_in_place_of_an_optimizer_is_refused():
    weight, _, scaler = setup()
    scaler.scale(weight.sum()).backward()
    for wrong in (GradScaler("cpu"), weight):
        with pytest.raises(LossScaleError, match="Expected an optimizer itself, not one that is wrapped in a scaler"):
            scaler.step(wrong)


@pytest.mark.parametrize("call", ["step", "unscale_", "update"])
def test_calls_before_anything_was_scaled_say_what_is_missing(call):
    weight, optimizer, scaler = setup()
    weight.sum().backward()
    with pytest.raises(LossScaleError, match=rf"asked for `{call}` before anything was scaled\. Call `scaler\.scale"):
        getattr(scaler, call)(*([optimizer] if call != "update" else []))


def test_an_update_without_a_step_and_a_second_step_are_refused():
    weight, optimizer, scaler = setup()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(LossScaleError, match=r"updated before a step\. Call `step\(optimizer\)` first"):
        scaler.update()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


def test_a_new_scale_is_checked_and_kept_above_the_floor():
    weight, optimizer, scaler = setup()
    one_step(weight, optimizer, scaler)
    scaler.update(0.5)
    assert scaler.get_scale() == 1.0
    for wrong in (math.inf, 1e39, "4", True, torch.ones(2)):
        with pytest.raises(LossScaleError, match="new_scale="):
            scaler.update(wrong)


def test_the_state_of_float8_layers_is_not_scaled():
    amaxes = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = narrowcast.apply(nn.Linear(8, 8), "float8")
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer)
        amaxes.append(model.float8_amax_history[:2, 0].clone())
    assert torch.equal(*amaxes)


@pytest.mark.parametrize("fused", [False, True], ids=["not fused", "fused"])
def test_a_skipped_step_leaves_no_trace_in_float8_state(fused):
    model = narrowcast.apply(nn.Linear(8, 8), "float8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    model.bias.grad[0] = math.inf
    assert scaler.step(optimizer) is False
    state = {name: tensor for name, tensor in model.state_dict().items() if "float8" in name}
    assert all(tensor.count_nonzero() == 0 for tensor in state.values())


def test_a_gradient_that_overflows_in_float16_skips_the_step_of_a_float8_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    narrowcast.apply(model, "float8_from_mixed_float16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    loss = model(torch.ones(2, 8)).float().sum() * 1e4
    scaler.scale(loss).backward()
    assert scaler.step(optimizer) is False


def trained(policy, scaler=None):
    model = narrowcast.apply(nn.Linear(8, 8), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(2, 8)).float().sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def test_float16_without_a_scaler_is_one_warning_that_says_what_to_do():
    with pytest.warns(
        UserWarning,
        match=r"without a loss scaler: .*narrowcast\.torch\.GradScaler and variables in float32 \(mixed_float16\), or",
    ) as caught:
        trained("mixed_float16")
    assert len(caught) == 1


@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_float16_with_a_scaler_is_no_warning(scaler):
    trained("mixed_float16", scaler("cpu", init_scale=8.0))
