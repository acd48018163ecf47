"""Training runs under float policies: what is kept in the variable dtype, and how far losses are from float32's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast
from tests.torch.models import ConvNet, TinyLM

# Some steps here are taken without a loss scaler on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Layers of this model compute in float16")

MIXED = ["mixed_bfloat16", "mixed_float16"]
COMPUTE = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-2),
}


def language_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences in which each id is followed by the next one, so that there is something to learn."""
    start = torch.randint(40, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(9)) % 40
    return ids[:, :-1], ids[:, 1:]


def image_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose class is their brightest colour."""
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.randn(16, 3, 8, 8, generator=generator), torch.randint(3, (16,), generator=generator)
    images[torch.arange(16), labels] += 2
    return images, labels


TASKS = {"language": (TinyLM, language_batch), "images": (ConvNet, image_batch)}


def train(
    model: nn.Module,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    num_steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    max_norm: float | None = None,
) -> list[float]:
    optimizer = optimizer or OPTIMIZERS["adamw"](model.parameters())
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step in range(num_steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def fresh(task: str, policy: str | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = TASKS[task][0]()
    return model if policy is None else narrowcast.apply(model, policy)


# What is kept in the variable dtype.


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("task", TASKS)
def test_weights_gradients_and_optimizer_states_stay_float32_through_a_run(task: str, policy: str) -> None:
    for name, make in OPTIMIZERS.items():
        model = fresh(task, policy)
        optimizer = make(model.parameters())
        train(model, TASKS[task][1], 2, optimizer)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, name
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}, name
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        assert {value.dtype for value in states} == {torch.float32}, name


@pytest.mark.parametrize("task", TASKS)
def test_buffers_and_running_statistics_stay_as_they_are(task: str) -> None:
    before = {name: buffer.dtype for name, buffer in fresh(task).named_buffers()}
    model = fresh(task, "mixed_float16")
    train(model, TASKS[task][1], 3)
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == before


def test_gradients_are_rounded_nowhere_between_the_layer_and_the_optimizer() -> None:
    """A gradient that float16 cannot hold arrives: the weight's gradient is a sum that is never stored in float16."""
    layer = narrowcast.apply(nn.Linear(64, 1, bias=False), "mixed_float16")
    x = torch.full((64, 64), 100.0)
    layer(x).sum().backward()
    assert layer.weight.grad.unique().tolist() == [6400.0]
    (layer(x).sum() * 20).backward()
    # 128,000 is beyond 65,504. Where the product itself is made in float16 it overflows, which a loss scaler sees.
    assert layer.weight.grad.unique().tolist() in ([6400.0 + 128000.0], [math.inf])


@pytest.mark.parametrize("policy", MIXED)
def test_updates_too_small_for_the_compute_dtype_add_up(policy: str) -> None:
    model = narrowcast.apply(nn.Sequential(nn.Linear(8, 8)), policy)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(1000):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    # 1000 float32 subtractions of 1e-5 near 1, each off by half of 2**-24.
    assert torch.allclose(model[0].weight, torch.tensor(0.99), atol=1000 * 2**-25)


def test_weight_decay_too_small_for_the_compute_dtype_takes_effect() -> None:
    model = narrowcast.apply(nn.Sequential(nn.Linear(8, 8, bias=False)), "mixed_bfloat16")
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        (model(torch.ones(1, 8)).sum() * 0.0).backward()
        optimizer.step()
    # Each step multiplies by 1 - 1e-5, rounded to float32: within 1000 halves of 2**-24.
    assert torch.allclose(model[0].weight, torch.tensor((1 - 1e-5) ** 1000), atol=1000 * 2**-24)


@pytest.mark.parametrize("policy", MIXED)
def test_clipping_measures_and_scales_in_float32(policy: str) -> None:
    model = fresh("language", policy)
    ids, targets = language_batch(0)
    F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten()).backward()
    gradients = [parameter.grad.double() for parameter in model.parameters()]
    exact = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    norm = nn.utils.clip_grad_norm_(model.parameters(), exact / 3)
    # float32 sums of at most 2560 squares: 2560 * 2**-24 relative; far below a unit of bfloat16 (2**-8).
    assert norm.item() == pytest.approx(exact, rel=2e-4)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad.double(), gradient / 3, rtol=5e-4, atol=0)


def test_accumulated_gradients_add_up_in_float32() -> None:
    layer = narrowcast.apply(nn.Linear(4, 1, bias=False), "mixed_bfloat16")
    for _ in range(1000):
        layer(torch.ones(1, 4)).sum().backward()
    # bfloat16 would stop at 256, where adding 1 no longer changes anything.
    assert layer.weight.grad.unique().tolist() == [1000.0]


def test_labels_and_ids_are_never_cast() -> None:
    seen = []
    model = fresh("language", "mixed_float16")
    model.embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    ids = torch.tensor([[39, 2, 7]])
    assert model(ids).shape == (1, 3, 40)
    assert seen == [torch.int64]
    loss = narrowcast.apply(nn.CrossEntropyLoss(), "mixed_float16")
    big = torch.zeros(1, 70_000)  # more classes than float16 has whole numbers
    big[0, 69_999] = 5
    assert loss(big, torch.tensor([69_999])) < loss(big, torch.tensor([65_504]))


# How the numbers come out.


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("task", TASKS)
def test_losses_of_a_run_are_about_as_near_to_float32_as_autocast_s(task: str, policy: str) -> None:
    batch = TASKS[task][1]
    plain, mixed, autocast = (
        np.array(train(model, batch, 40, torch.optim.AdamW(model.parameters(), 5e-3), autocast=outer))
        for model, outer in ((fresh(task), None), (fresh(task, policy), None), (fresh(task), COMPUTE[policy]))
    )
    assert plain[-1] < 0.8 * plain[0]
    # Autocast keeps fewer things in float32 on the CPU, so its distance is the yardstick; 3 for the luck of one run.
    # The floor is one unit of the compute dtype on a loss of 4.
    floor = 4 * torch.finfo(COMPUTE[policy]).eps
    assert np.abs(mixed - plain).max() < 3 * np.abs(autocast - plain).max() + floor


@pytest.mark.parametrize("policy", MIXED)
def test_first_step_is_that_of_a_model_written_out_by_hand(policy: str) -> None:
    compute = COMPUTE[policy]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    model = narrowcast.apply(copy.deepcopy(plain), policy)
    x, labels = torch.randn(16, 32), torch.randint(8, (16,))

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        first, norm, last = plain
        x = F.linear(x.to(compute).float(), first.weight.to(compute).float(), first.bias.to(compute).float())
        x = norm(x.to(compute).float()).to(compute)
        return F.linear(x.float(), last.weight.to(compute).float(), last.bias.to(compute).float()).to(compute)

    for logits in (model(x), by_hand(x)):
        F.cross_entropy(logits.float(), labels).backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        # Both round at the same places; a native product may round its sums in another order, by one unit each.
        tolerance = 4 * torch.finfo(compute).eps * expected.grad.abs().max()
        assert torch.allclose(actual.grad, expected.grad, rtol=0, atol=tolerance.item())


def test_float32_policy_changes_not_a_bit_of_a_run() -> None:
    for task, (_, batch) in TASKS.items():
        assert train(fresh(task, "float32"), batch, 5) == train(fresh(task), batch, 5)


def test_outer_autocast_does_not_overrule_the_policy_in_a_run() -> None:
    batch = TASKS["language"][1]
    model = fresh("language", "mixed_float16")
    expected = train(fresh("language", "mixed_float16"), batch, 5)
    assert train(model, batch, 5, autocast=torch.bfloat16) == expected


def test_frozen_layers_do_not_move_and_earlier_ones_learn() -> None:
    model = fresh("language", "mixed_bfloat16")
    model.blocks[1].requires_grad_(requires_grad=False)
    frozen = copy.deepcopy(model.blocks[1].state_dict())
    before = model.blocks[0].up.weight.detach().clone()
    train(model, language_batch, 3)
    assert all(torch.equal(value, frozen[name]) for name, value in model.blocks[1].state_dict().items())
    assert not torch.equal(model.blocks[0].up.weight, before)


def test_average_of_weights_is_taken_in_float32() -> None:
    model = fresh("language", "mixed_bfloat16")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for _ in range(3):
        train(model, language_batch, 2, optimizer)
        average.update_parameters(model)
    assert {parameter.dtype for parameter in average.parameters()} == {torch.float32}
    ids = language_batch(0)[0]
    assert average(ids).dtype == torch.bfloat16


# float16 and the scale of the loss.


def tiny_gradients(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight gradients of the first of two layers for a loss of very small gradients, and the exact ones."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model = narrowcast.apply(copy.deepcopy(plain), "mixed_float16")
    x = torch.randn(8, 16)
    (model(x).float().square().mean() * 1e-7 * scale).backward()
    (plain.double()(x.double()).square().mean() * 1e-7).backward()
    return model[0].weight.grad.double() / scale, plain[0].weight.grad


def test_small_gradients_vanish_in_float16_and_survive_under_a_scaled_loss() -> None:
    lost, exact = tiny_gradients(1.0)
    kept, _ = tiny_gradients(2.0**16)
    assert (lost - exact).norm() > 0.3 * exact.norm()
    # Two products and three roundings to float16, 2**-11 each, along the way.
    assert (kept - exact).norm() < 5 * 2.0**-11 * exact.norm()


def test_run_with_a_scaled_loss_skips_overflows_and_learns() -> None:
    model = fresh("language", "mixed_float16")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before = copy.deepcopy(model.state_dict())
    train(model, language_batch, 1, optimizer, scaler=scaler, max_norm=1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    losses = train(model, language_batch, 40, optimizer, scaler=scaler, max_norm=1.0)
    assert scaler.get_scale() < 2.0**24
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


# Against Keras.


@pytest.mark.parametrize("policy", MIXED)
def test_training_goes_as_in_keras(policy: str) -> None:
    """Keras' layers and ours from the same weights, on the same batches, by the same optimizer."""
    from tests.dtype_policies.outcomes import keras

    theirs = keras.Sequential(
        [
            keras.layers.Input((32,)),
            keras.layers.Dense(64, activation="relu", dtype=policy),
            keras.layers.LayerNormalization(epsilon=1e-5, dtype=policy),
            keras.layers.Dense(8, dtype=policy),
        ]
    )
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))
    dense = [theirs.layers[0].kernel, theirs.layers[2].kernel]
    with torch.no_grad():
        for kernel, module in zip(dense, (plain[0], plain[3]), strict=True):
            module.weight.copy_(kernel.value.detach().t())
            module.bias.zero_()
    ours = narrowcast.apply(copy.deepcopy(plain), policy)
    variables = [variable.value for variable in theirs.trainable_variables]
    models = {"theirs": (theirs, variables), "ours": (ours, ours.parameters()), "plain": (plain, plain.parameters())}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for name, (model, parameters) in models.items():
        optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            x, labels = torch.randn(32, 32, generator=generator), torch.randint(8, (32,), generator=generator)
            optimizer.zero_grad()
            logits = model(x)
            assert logits.dtype == (torch.float32 if name == "plain" else COMPUTE[policy])
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert {variable.dtype for variable in variables} == {parameter.dtype for parameter in ours.parameters()}
    # Both round, in part at other places (Keras between product and bias): as far from each other as from float32.
    theirs_losses = np.array(losses["theirs"])
    assert np.abs(theirs_losses - losses["ours"]).max() < 2 * np.abs(theirs_losses - losses["plain"]).max()
    for kernel, module, exact in zip(dense, (ours[0], ours[3]), (plain[0], plain[3]), strict=True):
        expected = kernel.value.detach().t()
        assert (module.weight - expected).norm() < 2 * (exact.weight - expected).norm()
