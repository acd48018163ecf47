"""The whole job: train under every recipe, kill one run and resume it, look into a float8 run, report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

import narrowcast
from narrowcast.demo.training import checkpoint
from narrowcast.demo.training.corpus import Corpus, read
from narrowcast.demo.training.loop import SIZES, Step, loss_of, new_model
from narrowcast.demo.training.recipe import RECIPES, find
from narrowcast.demo.training.report import make_report
from narrowcast.demo.training.runs import Job, Run, run_all
from narrowcast.observe import Summary, observe
from narrowcast.report import Report, page

__all__ = ["KILLED", "jobs_for", "run"]

KILLED = "float8"
"""The recipe whose run is killed and resumed: the one with the most state."""

NUM_OBSERVED = 20


def jobs_for(num_seeds: int, num_steps: int) -> list[Job]:
    """Returns the runs of a report: every recipe with every seed, and one of them again, killed in the middle."""
    # Not at a multiple of the steps between checkpoints, so that some steps are lost and have to be done again.
    killed = Job(KILLED, 0, kill_after=num_steps // 2 + 13)
    return [killed, *(Job(recipe.name, seed) for seed in range(num_seeds) for recipe in RECIPES)]


def run(
    out: Path,
    corpus: Path,
    *,
    size: str,
    num_seeds: int,
    on_step: Callable[[Job, Step], None] = lambda job, step: None,
) -> Report:
    """Does the whole job and writes `report.html`, `report.json`, `observed.html` and the losses under `out`.

    Args:
        out: a folder; made if missing. Checkpoints of an earlier job in it are deleted.
        corpus: the archive with the text.
        size: the name of the settings, one of `SIZES`.
        num_seeds: how many seeds.
        on_step: hears of every step, from several threads.

    Raises:
        CheckpointError: the corpus cannot be read, or a training process failed.
    """
    text = read(corpus)
    settings = SIZES[size]
    shutil.rmtree(out / "runs", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    # Two small matrix products side by side are faster than one after the other with two threads each.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_processes = min(2, num_cores)
    num_threads = max(1, num_cores // num_processes)
    runs = run_all(
        jobs_for(num_seeds, settings.num_steps),
        size=size,
        corpus=corpus,
        out=out / "runs",
        num_processes=num_processes,
        num_threads=num_threads,
        on_step=on_step,
    )
    num_parameters = sum(parameter.numel() for parameter in new_model(text, settings, 0).parameters())
    report = make_report(runs, size, num_parameters=num_parameters, num_threads=num_threads)
    (out / "report.html").write_text(page(report), encoding="utf-8")
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False), encoding="utf-8")
    (out / "losses.json").write_text(json.dumps(_losses(runs)), encoding="utf-8")
    watched = next(run for run in runs if run.job.recipe == KILLED and run.job.kill_after is None)
    _observed(watched, text, size).write(out / "observed.html")
    return report


def _losses(runs: list[Run]) -> list[dict[str, object]]:
    return [
        {
            "recipe": run.job.recipe,
            "seed": run.job.seed,
            "killed_after": run.job.kill_after,
            "losses": [step.loss for step in run.steps],
            "held_out": {step.number: step.held_out_loss for step in run.steps if step.held_out_loss is not None},
        }
        for run in runs
    ]


def _observed(run: Run, text: Corpus, size: str) -> Summary:
    """What float8 does to the values in some steps from the last checkpoint of a run on."""
    settings = SIZES[size]
    start = checkpoint.newest(run.folder)
    model = new_model(text, settings, run.job.seed)
    if start is None:
        narrowcast.apply(model, find(run.job.recipe).policy)
    else:
        narrowcast.load(model, start / "model")
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate / 20)
    with observe(model, every=1) as watch:
        for step in range(NUM_OBSERVED):
            inputs, targets = text.batch(step, num_windows=settings.num_windows, context=settings.context, seed=1)
            loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return watch.summary()
