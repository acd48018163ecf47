"""Claim: a float8 training step, emulated on the CPU, takes at most 1.2 × a float32 step; a mixed_bfloat16 step 0.75 ×.

The transformer of `make train` (3.2 million parameters) under each of its recipes, whole steps (forward, backward,
clipping, AdamW), all recipes in turns in one process, from the same weights and on the same batches. mixed_bfloat16
can be faster than float32 only on a CPU that multiplies bfloat16 (AVX-512 BF16, AMX); elsewhere its operands are
rounded and multiplied in float32, and what is said is how much the rounding costs. Eager, rounding to float8 is five
passes over a tensor; `torch.compile` makes one of them, for which both sides are measured compiled as well.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

import torch
from torch import nn

import narrowcast
from narrowcast.demo.training.corpus import Corpus
from narrowcast.demo.training.loop import LARGE, loss_of, new_model
from narrowcast.demo.training.recipe import RECIPES, Recipe
from narrowcast.observe.latency import measure
from narrowcast.torch.gemm import slow_on_cpu
from result import write

CLAIM = "A training step on the CPU against float32: float8 (emulated) at most 1.2 ×, mixed_bfloat16 at most 0.75 ×"
WANTED = {"mixed_bfloat16": 0.75, "float8": 1.2, "float8/current": 1.2}


def stepper(
    recipe: Recipe, text: Corpus, num_windows: int, losses: list[float], *, is_compiled: bool
) -> Callable[[], None]:
    """Makes what does one more step under a recipe."""
    model = narrowcast.apply(new_model(text, LARGE, 0), recipe.policy)
    if is_compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        batch = text.batch(len(losses), num_windows=num_windows, context=LARGE.context, seed=0)
        loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    letters = torch.randint(84, (50_000,), generator=torch.Generator().manual_seed(0))
    text = Corpus("".join(chr(33 + code) for code in letters.tolist()))
    rows, holds = [], True
    for num_windows, is_compiled in itertools.product((8, 32), (False, True)):
        torch.compiler.reset()  # there is a limit to how many models of one class it keeps
        losses: dict[str, list[float]] = {recipe.name: [] for recipe in RECIPES}
        steps = {
            recipe.name: stepper(recipe, text, num_windows, losses[recipe.name], is_compiled=is_compiled)
            for recipe in RECIPES
        }
        found = measure(steps, num_rounds=options.rounds, budget_s=180)
        plain = found["float32"].median_ms
        for recipe in RECIPES:
            # The same training: losses on random text stay near the logarithm of the number of letters.
            if not all(
                math.isfinite(loss) and abs(loss - losses["float32"][i]) < 0.1
                for i, loss in enumerate(losses[recipe.name])
            ):
                raise SystemExit(f"{recipe.name}: losses are not those of float32")
            ratio = found[recipe.name].median_ms / plain
            wanted = WANTED.get(recipe.name)
            holds = holds and (wanted is None or ratio <= wanted)
            rows.append(
                {
                    "characters, recipe": f"{num_windows * LARGE.context}, {recipe.name}",
                    "run": "compiled" if is_compiled else "eager",
                    "step": f"{found[recipe.name].median_ms:.1f} ms",
                    "against float32": f"{ratio:.2f} ×",
                    "wanted": "–" if wanted is None else f"{wanted:.2f} ×",
                }
            )
    slow = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in slow_on_cpu()))
    notes = [f"This CPU has no instructions for {slow}: they are multiplied in float32 and rounded." if slow else ""]
    write(__file__, claim=CLAIM, rows=rows, holds=holds, notes=[n for n in notes if n], num_threads=options.threads)


if __name__ == "__main__":
    main()
