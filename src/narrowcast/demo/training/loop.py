"""The training loop: one recipe, one seed, from the beginning or from the newest checkpoint.

What narrowcast adds to a plain PyTorch loop is one line, `narrowcast.apply` (or `narrowcast.load`). float8's scales
advance by themselves when the optimizer steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast
from narrowcast.demo.training import checkpoint
from narrowcast.demo.training.corpus import Corpus
from narrowcast.demo.training.model import CharTransformer
from narrowcast.demo.training.recipe import Recipe
from narrowcast.torch.amp import GradScaler

__all__ = ["LARGE", "SIZES", "SMALL", "TINY", "Settings", "Step", "loss_of", "new_model", "train", "validate"]


@dataclass(frozen=True)
class Settings:
    """How large the model is and how it is trained; the same for every recipe.

    Args:
        width: features of each character.
        num_heads: attention heads.
        num_blocks: blocks.
        context: characters in a window.
        num_windows: windows in a batch.
        num_steps: optimizer steps.
        learning_rate: its greatest value, after the warm-up.
        num_warmup_steps: steps over which the learning rate rises from zero; then it falls to a twentieth by a half
            cosine.
        weight_decay: of AdamW.
        max_norm: the norm that gradients are clipped to.
        validate_every: steps between two measurements of the held-out loss.
        num_held_out: windows that these use.
        num_final: windows that the held-out loss after the last step uses, the one that recipes are compared by.
        save_every: steps between two checkpoints.
    """

    width: int
    num_heads: int
    num_blocks: int
    context: int
    num_windows: int
    num_steps: int
    learning_rate: float
    num_warmup_steps: int
    weight_decay: float = 0.1
    max_norm: float = 1.0
    validate_every: int = 50
    num_held_out: int = 64
    num_final: int = 512
    save_every: int = 50


LARGE = Settings(
    width=256,
    num_heads=4,
    num_blocks=4,
    context=64,
    num_windows=8,
    num_steps=300,
    learning_rate=3e-3,
    num_warmup_steps=50,
)
"""3.2 million parameters: what `make train` trains, one seed."""

SMALL = Settings(
    width=96,
    num_heads=4,
    num_blocks=3,
    context=64,
    num_windows=8,
    num_steps=400,
    learning_rate=6e-3,
    num_warmup_steps=50,
)
"""0.35 million parameters: what `make train-report` trains, three seeds."""


TINY = Settings(
    width=32,
    num_heads=2,
    num_blocks=2,
    context=32,
    num_windows=4,
    num_steps=120,
    learning_rate=4e-3,
    num_warmup_steps=10,
    validate_every=20,
    save_every=20,
)
"""Seconds for each recipe: to see that the machinery works, and nothing about the recipes."""

SIZES = {"large": LARGE, "small": SMALL, "tiny": TINY}
"""The settings by name."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step came to.

    Args:
        number: how many steps are done after it.
        loss: the batch's mean cross-entropy in nats a character, before the step.
        seconds: how long it took, without validation and saving.
        held_out_loss: the loss on the part of the text that is not trained on, where it was measured after this step.
        final_loss: the same on more of that text, after the last step.
        was_taken: whether the weights changed; a loss scaler skips a step whose gradients overflowed.
        resumed_from: the checkpoint's step where this is the first step after a restart.
    """

    number: int
    loss: float
    seconds: float
    held_out_loss: float | None = None
    final_loss: float | None = None
    was_taken: bool = True
    resumed_from: int | None = None


def new_model(corpus: Corpus, settings: Settings, seed: int) -> CharTransformer:
    """Returns the model before any step: the same weights for every recipe."""
    torch.manual_seed(seed)
    return CharTransformer(
        len(corpus.characters),
        context=settings.context,
        width=settings.width,
        num_heads=settings.num_heads,
        num_blocks=settings.num_blocks,
    )


def train(recipe: Recipe, settings: Settings, corpus: Corpus, folder: Path, *, seed: int) -> Iterator[Step]:
    """Trains step by step, from the newest checkpoint in `folder` if there is one, and yields what each step came to.

    Args:
        recipe: what is computed in what.
        settings: the model and its training.
        corpus: the text.
        folder: where checkpoints lie and are written; made if missing.
        seed: decides the first weights and the batches.
    """
    model = new_model(corpus, settings, seed)
    start = checkpoint.newest(folder)
    if start is None:
        narrowcast.apply(model, recipe.policy)
    else:
        narrowcast.load(model, start / "model")

    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    scaler = GradScaler("cpu", enabled=recipe.scales_loss)
    state: dict[str, checkpoint.Stateful] = {"optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    first = 0 if start is None else checkpoint.restore(start, state)

    for step in range(first, settings.num_steps):
        began = time.perf_counter()
        inputs, targets = corpus.batch(step, num_windows=settings.num_windows, context=settings.context, seed=seed)
        loss = loss_of(model, inputs, targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        was_taken = scaler.step(optimizer)
        scaler.update()
        if was_taken:
            schedule.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began

        done = step + 1
        is_last = done == settings.num_steps
        held_out_loss = final_loss = None
        if done % settings.validate_every == 0 or is_last:
            held_out_loss = validate(model, settings, corpus, settings.num_held_out)
        if is_last:
            final_loss = validate(model, settings, corpus, settings.num_final)
        if done % settings.save_every == 0 and not is_last:
            checkpoint.save(folder, step=done, model=model, state=state)
        yield Step(
            done,
            loss.item(),
            seconds,
            held_out_loss,
            final_loss,
            was_taken,
            first if start is not None and step == first else None,
        )


@torch.no_grad()
def validate(model: nn.Module, settings: Settings, corpus: Corpus, num_windows: int) -> float:
    """Returns the mean loss on windows of the part of the text that is held out, in nats a character."""
    inputs, targets = corpus.held_out(num_windows=num_windows, context=settings.context)
    model.eval()
    parts = [slice(start, start + 64) for start in range(0, num_windows, 64)]
    losses = [loss_of(model, inputs[part], targets[part]).item() for part in parts]
    model.train()
    return math.fsum(losses) / len(losses)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of a batch, in nats a character."""
    # A loss is computed in float32, whatever the logits are in.
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def _rate(step: int, settings: Settings) -> float:
    """The learning rate at a step, in shares of its greatest value."""
    if step < settings.num_warmup_steps:
        return (step + 1) / settings.num_warmup_steps
    along = (step - settings.num_warmup_steps) / max(1, settings.num_steps - settings.num_warmup_steps)
    return 0.05 + 0.475 * (1 + math.cos(math.pi * along))
