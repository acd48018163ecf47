"""When the state of delayed scaling moves on: optimizers, scalers, manual clocks, threads."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.errors import ModelError
from narrowcast.torch import float8_clock
from narrowcast.torch.float8_clock import advance, set_clock
from narrowcast.torch.float8_state import HISTORY, INDEX, PENDING, SCALE
from tests.torch.test_float8_state import Net, assert_same_state, randn, sgd, state, step

OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_the_state_on_once_a_step(name):
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for count in range(1, 3):
        step(model, optimizer)
        assert model.a.float8_history_index.tolist() == [count] * 3


def test_lbfgs_moves_the_state_on_once_a_step_however_often_it_evaluates():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(randn(5, 16)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert model.a.float8_history_index.tolist() == [1, 1, 1]


def test_two_optimizers_of_one_model_move_it_on_once():
    model = Net()
    optimizers = torch.optim.SGD(model.a.parameters(), lr=1e-3), torch.optim.SGD(model.b.parameters(), lr=1e-3)
    model(randn(5, 16)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert model.a.float8_history_index.tolist() == [1, 1, 1]
    assert model.b.float8_history_index.tolist() == [1, 1, 1]


def test_an_optimizer_without_float8_layers_is_left_alone():
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.5).step()
    assert parameter.item() == 0.5


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_a_step_that_a_gradient_scaler_skips_does_not_count(fused):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    step(model, optimizer)
    before, weights = state(model), model.a.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(randn(5, 16)).square().sum()).backward()
    model.c.bias.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.a.weight, weights)
    assert torch.equal(model.a.float8_scale, before["a.float8_scale"])
    assert model.a.float8_history_index.tolist() == [1, 1, 1]
    optimizer.zero_grad()
    step(model, optimizer)
    assert model.a.float8_history_index.tolist() == [2, 2, 2]


def test_what_a_skipped_fused_step_saw_is_forgotten():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(randn(5, 16)).square().sum()).backward()
    model.c.bias.grad[0] = torch.inf
    scaler.step(optimizer)
    assert model.a.float8_pending_amax.count_nonzero() == 0


def test_of_two_fused_optimizers_only_the_skipped_one_s_layers_forget():
    model = Net()
    of_a, of_b = (torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True) for layer in (model.a, model.b))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(randn(5, 16)).square().sum()).backward()
    model.a.bias.grad[0] = torch.inf
    scaler.step(of_a)
    scaler.step(of_b)
    assert model.a.float8_history_index.tolist() == [0, 0, 0]
    assert model.b.float8_history_index.tolist() == [1, 1, 1]


def in_backward(model):
    """Steps each parameter as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_an_optimizer_in_backward_moves_the_state_on_once_at_its_end(reentrant):
    model, plain = Net(reentrant), Net()
    in_backward(model)
    optimizer = sgd(plain)
    for count in range(1, 4):
        x = randn(5, 16, seed=count)
        model(x.requires_grad_()).square().sum().backward()
        assert model.a.float8_history_index.tolist() == [count] * 3
        assert model.b.float8_history_index.tolist() == [count] * 3
        assert model.a.float8_pending_amax.count_nonzero() == 0
        plain(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_state(state(model), state(plain))


def test_a_backward_that_breaks_off_does_not_stop_the_clock():
    model = Net(reentrant=True)
    in_backward(model)
    handle = model.a.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(randn(5, 16).requires_grad_()).square().sum().backward()
    handle.remove()
    for _ in range(2):
        model(randn(5, 16).requires_grad_()).square().sum().backward()
    assert model.a.float8_history_index.max() >= 2
    assert model.a.float8_pending_amax.count_nonzero() == 0


def test_a_manual_clock_waits_for_advance():
    model, other = Net(), Net()
    set_clock(model, "manual")
    optimizer = sgd(model)
    step(model, optimizer)
    assert model.a.float8_history_index.tolist() == [0, 0, 0]
    advance(model)
    assert model.a.float8_history_index.tolist() == [1, 1, 1]
    assert model.a.float8_pending_amax.count_nonzero() == 0
    set_clock(model, "optimizer")
    step(model, optimizer)
    assert model.a.float8_history_index.tolist() == [2, 2, 2]
    assert other.a.float8_history_index.tolist() == [0, 0, 0]


def test_advance_moves_the_model_given_and_no_other():
    one, other = Net(), Net()
    for model in (one, other):
        model(randn(5, 16)).square().sum().backward()
    pending = other.a.float8_pending_amax.clone()
    advance(one)
    assert one.a.float8_history_index.tolist() == [1, 1, 1]
    assert other.a.float8_history_index.tolist() == [0, 0, 0]
    assert torch.equal(other.a.float8_pending_amax, pending)


def test_an_unknown_clock_and_a_model_without_state_are_refused():
    with pytest.raises(ModelError, match=r"Clock is unknown\. Got clock='step'\. Expected 'optimizer' or 'manual'"):
        set_clock(Net(), "step")
    with pytest.raises(ModelError, match=r"no layer with float8 state\. Got type='Linear'.*Apply it first"):
        advance(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no layer with float8 state"):
        advance(narrowcast.apply(nn.Linear(4, 4), "float8/current"))


def test_models_that_threads_train_by_hand_do_not_disturb_each_other():
    def train(model, states):
        set_clock(model, "manual")
        optimizer = sgd(model)
        for seed in range(15):
            model(randn(5, 16, seed=seed).requires_grad_()).square().sum().backward()
            optimizer.step()
            advance(model)
            optimizer.zero_grad()
            copy.deepcopy(model)  # brings layers, so that the memory of all is laid out anew
        states.append(state(model))

    models, alone, together = [Net() for _ in range(4)], [], []
    train(models.pop(), alone)
    threads = [threading.Thread(target=train, args=(model, together)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == len(models)
    for found in together:
        assert_same_state(found, alone[0])


def test_an_optimizer_that_is_not_pytorchs_is_told_of_once(monkeypatch):
    monkeypatch.setattr(float8_clock._clock, "num_waiting", 0)
    monkeypatch.setattr(float8_clock, "MANY_PASSES", 3)
    model = nn.Sequential(nn.Linear(16, 16))
    narrowcast.apply(model, "float8")
    x = randn(2, 16)
    with torch.no_grad():
        for _ in range(20 * len(float8_clock._layers)):
            model(x)  # no training

    def train():
        for _ in range(5 * len(float8_clock._layers)):
            model(x).sum().backward()

    with pytest.warns(UserWarning, match=r"state has not moved on once.*narrowcast.torch.advance") as caught:
        train()
    assert len(caught) == 1


def test_a_step_in_time_gives_no_warning(monkeypatch):
    monkeypatch.setattr(float8_clock._clock, "num_waiting", 0)
    monkeypatch.setattr(float8_clock, "MANY_PASSES", 3)
    model = nn.Sequential(nn.Linear(16, 16))
    narrowcast.apply(model, "float8")
    optimizer = sgd(model)
    model(randn(2, 16)).sum().backward()
    optimizer.step()
    for _ in range(5 * len(float8_clock._layers)):
        model(randn(2, 16)).sum().backward()


def test_models_that_are_gone_are_forgotten():
    before = len(float8_clock._layers)
    model = Net()
    step(model, sgd(model))
    assert len(float8_clock._layers) > before
    del model
    gc.collect()
    assert len(float8_clock._layers) <= before


def test_layers_move_on_as_one_tensor_and_keep_their_own_buffers():
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)
    histories = [layer.float8_amax_history for layer in (model.a, model.b)]
    assert histories[0].data_ptr() + histories[0].nbytes == histories[1].data_ptr()
    # Each knows of its own memory only: copies and files of one layer hold no other's.
    assert histories[0].untyped_storage().nbytes() == histories[0].nbytes
    assert model.a.float8_pending_amax.untyped_storage().nbytes() == 12
    assert [name for name, _ in model.a.named_buffers()] == [SCALE, HISTORY, INDEX]
    assert PENDING in model.a.__dict__
    model.a.float8_amax_history = model.a.float8_amax_history.clone()  # any replacement of a buffer
    step(model, optimizer)
    assert model.a.float8_history_index.tolist() == [2, 2, 2]
    assert model.a.float8_amax_history[:, :3].count_nonzero(1).tolist() == [2, 2, 2]
