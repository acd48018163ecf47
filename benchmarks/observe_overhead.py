"""Claim: recording what policies do to values takes under 20 % of a training step.

The transformer of `make train` (3.2 million parameters, 512 characters a step), one copy watched and one not, in
turns in one process; the two are checked to stay equal bit for bit. Recording is not the same in every step, so means
are compared and not medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch

import narrowcast
from narrowcast.demo.training.corpus import Corpus
from narrowcast.demo.training.loop import LARGE, loss_of, new_model
from narrowcast.demo.training.recipe import find
from narrowcast.observe import observe
from result import write

CLAIM = "Observing a training run takes under 20 % of its time"
WANTED = 0.20
CASES = {"as often as 10 % allows (the default)": None, "every step": 1, "every 10th step": 10}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(84, (50_000,), generator=draw)
    text = Corpus("".join(chr(33 + code) for code in letters.tolist()))
    rows, holds = [], True
    for recipe in ("mixed_bfloat16", "float8"):
        for case, every in CASES.items():
            plain = narrowcast.apply(new_model(text, LARGE, 0), find(recipe).policy)
            models = {"plain": plain, "watched": copy.deepcopy(plain)}
            optimizers = {name: torch.optim.AdamW(model.parameters(), 1e-3) for name, model in models.items()}
            times: dict[str, list[float]] = {name: [] for name in models}
            losses: dict[str, list[float]] = {name: [] for name in models}
            with observe(models["watched"], every=every) as watch:
                for step in range(options.steps):
                    batch = text.batch(step, num_windows=LARGE.num_windows, context=LARGE.context, seed=0)
                    for name in sorted(models, reverse=step % 2 == 1):
                        began = time.perf_counter()
                        loss = loss_of(models[name], *batch)
                        loss.backward()
                        optimizers[name].step()
                        optimizers[name].zero_grad()
                        times[name].append(time.perf_counter() - began)
                        losses[name].append(loss.item())
            if losses["plain"] != losses["watched"]:
                raise SystemExit(f"{recipe}: losses differ where the model is watched")
            mean = {name: statistics.fmean(found[3:]) for name, found in times.items()}
            share = mean["watched"] / mean["plain"] - 1
            # Whoever asks for every step has chosen what it costs.
            holds = holds and (every == 1 or share < WANTED)
            summary = watch.summary()
            rows.append(
                {
                    "recipe, recording": f"{recipe}, {case}",
                    "steps recorded": f"{summary.num_recorded} of {summary.num_steps}",
                    "plain": f"{mean['plain'] * 1000:.1f} ms",
                    "watched": f"{mean['watched'] * 1000:.1f} ms",
                    "more": f"{share:+.1%}",
                    "by its own account": f"{summary.overhead:+.1%}",
                    "wanted": "–" if every == 1 else f"under {WANTED:.0%}",
                }
            )
    write(__file__, claim=CLAIM, rows=rows, holds=holds, num_threads=options.threads)


if __name__ == "__main__":
    main()
