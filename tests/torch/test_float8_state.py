"""The state of delayed scaling through everything that a training run does to a model, in one process."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast
from narrowcast.numerics import delayed_scaling
from narrowcast.torch import float8_gemm
from narrowcast.torch.float8_state import HISTORY, INDEX, ROLES, SCALE
from tests.torch.models import tiny_lm


def randn(*shape, seed=0, factor=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * factor


class Net(nn.Module):
    """Two float8 layers, the second used twice."""

    def __init__(self, reentrant=None, policy="float8"):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 32)
        self.c = nn.Linear(32, 4)
        self.reentrant = reentrant
        narrowcast.apply(self, {"[ab]": policy})

    def body(self, x):
        return self.b(torch.relu(self.b(torch.relu(self.a(x)))))

    def forward(self, x):
        if self.reentrant is None:
            return self.c(self.body(x))
        return self.c(checkpoint(self.body, x, use_reentrant=self.reentrant))


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "float8" in name}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def step(model, optimizer, *seeds, factor=1.0):
    for seed in seeds or (0,):
        model(randn(5, 16, seed=seed, factor=factor).requires_grad_()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model, **options):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)


# The rule


def test_the_state_follows_the_pure_function_of_numerics():
    model = narrowcast.apply(nn.Linear(16, 8), narrowcast.QuantizedFloat8DTypePolicy("float32", 4))
    optimizer = sgd(model)
    largest = np.asarray([to.largest for _, to in ROLES], np.float32)
    expected = np.zeros(3, np.float32), np.zeros((3, 4), np.float32), np.zeros(3, np.int64)
    for seed in range(7):
        x = randn(5, 16, seed=seed, factor=2.0**seed if seed < 4 else 1.0).requires_grad_()
        y = model(x)
        grad = randn(5, 8, seed=100 + seed)
        y.backward(grad)
        pending = np.asarray([t.detach().abs().max().item() for t in (x, model.weight, grad)], np.float32)
        assert torch.equal(model.float8_pending_amax, torch.from_numpy(pending))
        optimizer.step()
        optimizer.zero_grad()
        expected = delayed_scaling.advance(*expected, pending, largest)
        for name, value in zip((SCALE, HISTORY, INDEX), expected, strict=True):
            assert torch.equal(getattr(model, name), torch.from_numpy(np.asarray(value)))
        assert torch.equal(model.float8_pending_amax, torch.zeros(3))


@pytest.mark.parametrize("use_max, expected", [(True, 448 / 8), (False, 448 / 2)])
def test_the_scale_comes_from_the_largest_or_the_newest_entry(use_max, expected):
    algorithm = "max" if use_max else "most_recent"
    policy = narrowcast.QuantizedFloat8DTypePolicy("float32", 4, amax_compute_algo=algorithm)
    model = narrowcast.apply(nn.Linear(4, 4), policy)
    optimizer = sgd(model)
    for value in (8.0, 2.0):
        model(torch.full((1, 4), value)).sum().backward()
        optimizer.step()
    assert model.float8_scale[0] == expected


def test_a_margin_is_so_many_powers_of_two():
    model = narrowcast.apply(nn.Linear(4, 4), narrowcast.QuantizedFloat8DTypePolicy("float32", 4, margin=2))
    model(torch.full((1, 4), 1.0)).sum().backward()
    sgd(model).step()
    assert model.float8_scale[0] == 448 / 4


def test_the_first_use_takes_its_scale_from_the_data():
    x = randn(5, 16, factor=1000.0)
    delayed, current = (narrowcast.apply(nn.Linear(16, 8), mode) for mode in ("float8", "float8/current"))
    current.load_state_dict(delayed.state_dict(), strict=False)
    assert torch.equal(delayed(x), current(x))


def test_the_scale_of_a_later_step_is_the_stored_one():
    model = narrowcast.apply(nn.Linear(4, 4, bias=False), "float8")
    nn.init.eye_(model.weight)
    model(torch.full((1, 4), 1.0)).sum().backward()
    sgd(model).step()
    nn.init.eye_(model.weight.data)
    # Scaled for a largest magnitude of 1, everything above saturates.
    torch.testing.assert_close(model(torch.full((1, 4), 3.0)), torch.full((1, 4), 1.0), rtol=1e-6, atol=0)


# Uses within one step


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputed_forwards_give_the_same_gradients_and_state(reentrant):
    plain, recomputed = Net(), Net(reentrant)
    optimizers = sgd(plain), sgd(recomputed)
    for seed in range(3):
        for model in (plain, recomputed):
            model(randn(5, 16, seed=seed).requires_grad_()).square().sum().backward()
        for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        assert_same_state(state(plain), state(recomputed))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(state(plain), state(recomputed))


def test_accumulated_micro_batches_make_one_entry_of_their_maximum():
    model = narrowcast.apply(nn.Linear(4, 4), "float8")
    optimizer = sgd(model)
    for value in (5.0, 1.0, 1.0, 1.0):
        model(torch.full((1, 4), value)).sum().backward()
    optimizer.step()
    assert model.float8_amax_history[0].count_nonzero() == 1
    assert model.float8_amax_history[0].max() == 5.0
    assert model.float8_history_index.tolist() == [1, 1, 1]


def test_a_layer_used_twice_makes_one_entry_of_the_maximum():
    model = Net()
    optimizer = sgd(model)
    inputs = []
    model.b.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().abs().max()))
    step(model, optimizer)
    assert len(inputs) == 2
    assert model.b.float8_amax_history[0].count_nonzero() == 1
    assert model.b.float8_amax_history[0, 0] == max(inputs)


def test_eval_and_no_grad_leave_the_state_untouched():
    model = Net()
    step(model, sgd(model))
    before = state(model)
    with torch.no_grad():
        model(randn(5, 16, factor=100.0))
    with torch.inference_mode():
        model(randn(5, 16, factor=100.0))
    model.eval()
    model(randn(5, 16, factor=100.0).requires_grad_()).sum().backward()
    assert_same_state(state(model), before)


def test_frozen_layers_keep_their_activation_scales_up_to_date():
    model = Net()
    model.a.requires_grad_(False)
    optimizer = sgd(model)
    step(model, optimizer, factor=1000.0)
    assert model.a.float8_scale[0] < 1
    assert model.a.weight.grad is None
    assert (model.a.float8_scale > 0).all()


def test_a_frozen_first_layer_without_input_gradients_moves_all_but_its_gradient():
    model = narrowcast.apply(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": "float8"})
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert (model[0].float8_scale > 0).tolist() == [True, True, False]


def test_layers_unused_in_a_step_do_not_move():
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)
    before = state(model.b)
    model.a(randn(5, 16, factor=50.0)).sum().backward()
    optimizer.step()
    assert_same_state(state(model.b), before)
    assert model.a.float8_history_index.tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)], ids=str)
def test_an_empty_batch_gives_an_empty_result_and_leaves_the_state(shape):
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)
    before = state(model)
    y = model(torch.zeros(shape, requires_grad=True))
    assert y.shape == (*shape[:-1], 4)
    y.sum().backward()
    optimizer.step()
    assert_same_state(state(model), before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_batches_that_are_not_finite_leave_the_state_healthy(value):
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)
    before = state(model)
    x = randn(5, 16)
    x[0, 0] = value
    loss = model(x.requires_grad_()).square().sum()
    loss.backward()
    assert loss.isnan()
    optimizer.step()
    after = state(model)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert torch.equal(after["a.float8_scale"][0], before["a.float8_scale"][0])
    assert after["a.float8_history_index"].tolist() == [1, 2, 1]  # the weight was finite


def test_an_outer_autocast_changes_nothing():
    plain, inside = Net(), Net()
    x = randn(5, 16)
    y = plain(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = inside.body(x)
        # Backward inside the region is bad practice, and must not lose digits either.
        z.square().sum().backward()
    y = plain.body(x)
    y.square().sum().backward()
    assert torch.equal(y, z)
    assert torch.equal(plain.a.weight.grad, inside.a.weight.grad)


def test_a_reduced_history_of_one_works():
    model = narrowcast.apply(nn.Linear(4, 4), narrowcast.QuantizedFloat8DTypePolicy("float32", 1))
    optimizer = sgd(model)
    for value in (8.0, 2.0, 4.0):
        model(torch.full((1, 4), value)).sum().backward()
        optimizer.step()
        assert model.float8_scale[0] == 448 / value


def test_a_whole_language_model_trains_with_ties_norms_and_attention():
    model = tiny_lm().train()
    narrowcast.apply(model, {r"blocks/\d+/(attention|up|down)": "float8"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    layer = model.blocks[0].attention
    # Queries, keys and values come from one tensor: the first product makes all three.
    assert layer.float8_history_index.tolist() == [30] * 3 + [0] * 6
    assert layer.out_proj.float8_history_index.tolist() == [30] * 3


# Copies, moves


def test_a_copy_in_mid_training_goes_its_own_way():
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer, 0)
    twin = copy.deepcopy(model)
    before = state(model)
    other = sgd(twin)
    step(twin, other, 1, factor=100.0)
    assert_same_state(state(model), before)
    assert twin.a.float8_history_index.tolist() == [2, 2, 2]
    step(model, optimizer, 1, factor=100.0)
    assert_same_state(state(model), state(twin))


def test_a_copy_between_micro_batches_has_seen_the_first_one():
    model = Net()
    model(randn(5, 16, factor=100.0)).square().sum().backward()
    twin = copy.deepcopy(model)
    model(randn(5, 16, seed=1)).square().sum().backward()
    assert_same_state({"input": twin.a.float8_pending_amax[0]}, {"input": randn(5, 16, factor=100.0).abs().max()})
    twin(randn(5, 16, seed=1)).square().sum().backward()
    sgd(model).step()  # the clock moves every model on that has seen something
    assert_same_state(state(twin), state(model))


def test_an_ema_copy_does_not_move_with_its_model():
    model = Net()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    before = state(ema.module)
    step(model, optimizer)
    assert_same_state(state(ema.module), before)


@pytest.mark.parametrize("use_buffers", [False, True], ids=["buffers copied", "buffers averaged"])
def test_an_ema_copy_scales_by_what_its_model_has_seen_and_sees_nothing_itself(use_buffers):
    model = Net()
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=use_buffers, multi_avg_fn=average)
    optimizer = sgd(model)
    step(model, optimizer)
    ema.update_parameters(model)  # the first time, everything is copied
    seen = state(model)
    assert_same_state(state(ema.module), seen)
    ema.eval()(randn(5, 16, factor=100.0))
    step(model, optimizer, 1, factor=10.0)
    assert_same_state(state(ema.module), seen)


def test_state_stays_float32_through_half_and_moves():
    model = Net(policy="float8_from_mixed_bfloat16")
    optimizer = sgd(model)
    step(model, optimizer)
    model(randn(5, 16)).float().sum().backward()  # pending amaxes
    before = state(model)
    for convert in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("cpu")):
        convert(model)
        assert_same_state(state(model), before)
    model.c.float()
    optimizer.step()
    assert model.a.float8_history_index.tolist() == [2, 2, 2]


def test_scales_are_float32_quotients_also_in_a_model_cast_to_half():
    model = narrowcast.apply(nn.Sequential(nn.Linear(16, 8)), "float8").half()
    x = torch.full((2, 16), 3.0, dtype=torch.float16)
    model(x).sum().backward()
    sgd(model).step()
    # The quotient rounded to float16 would be 149.375.
    assert model[0].float8_scale[0].item() == np.float32(448) / np.float32(3)


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("mode", ["float8", "float8/current", "float8/rowwise", "float8/block"])
def test_another_default_dtype_changes_nothing(mode, has_bfloat16, monkeypatch):
    monkeypatch.setattr(float8_gemm, "SLOW_ON_CPU", frozenset() if has_bfloat16 else {torch.bfloat16})
    inputs = [randn(5, 16, seed=seed) for seed in range(2)]

    def train():
        torch.manual_seed(0)
        layer = narrowcast.apply(nn.Linear(16, 8, dtype=torch.float32), f"{mode}_from_mixed_bfloat16")
        optimizer = sgd(layer)
        for x in inputs:
            layer(x).square().sum().backward()
            optimizer.step()
        return list(layer.state_dict().values())

    expected = train()
    torch.set_default_dtype(torch.float64)
    try:
        found = train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert all(map(torch.equal, found, expected))


def test_state_made_on_the_meta_device_is_empty_once_it_is_real():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    narrowcast.apply(model, "float8")
    model.to_empty(device="cpu")
    assert all(tensor.count_nonzero() == 0 for tensor in state(model).values())


def test_dequantizing_gives_the_plain_model_back():
    model = Net()
    step(model, sgd(model))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    narrowcast.dequantize(model)
    assert type(model.a) is nn.Linear
    assert set(model.state_dict()) == set(weights)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    step(model, sgd(model))  # the clock has forgotten it
