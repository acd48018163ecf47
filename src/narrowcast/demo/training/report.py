"""What the training runs came to: checks, tables and curves. The page and the committed Markdown are made from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from narrowcast.demo.training.loop import SIZES, Settings, Step
from narrowcast.demo.training.recipe import BASELINE, RECIPES, Recipe, find
from narrowcast.demo.training.runs import Run
from narrowcast.plan.table import Column, Table
from narrowcast.report import Check, Curve, Curves, Fact, Report, Section, read_environment
from narrowcast.report.plots import LIGHT, svg

__all__ = ["CONTROLS", "MAX_LOSS", "make_report", "resume_checks", "write_markdown"]

MAX_LOSS = 0.005
"""How much larger the held-out loss may be under float8 than under the baseline, relative: the mean of some seeds."""

CONTROLS = ("float32", "mixed_float16")
"""Recipes without float8. What they differ by from the baseline, of one seed, is what rounding does by chance."""

HELD_TO_IT = ("float8", "float8/current")
"""The recipes that `MAX_LOSS` holds for."""

NUM_AFTER = 50
"""Steps after a restart whose losses have to be equal bit for bit, at least."""


def make_report(runs: Sequence[Run], size: str, *, num_parameters: int, num_threads: int) -> Report:
    """Returns the report of uninterrupted runs of every recipe, and of killed ones of some.

    Args:
        runs: the runs.
        size: the name of their settings.
        num_parameters: the model's.
        num_threads: threads of each run.
    """
    whole = [run for run in runs if run.job.kill_after is None]
    by_recipe = {
        recipe.name: found for recipe in RECIPES if (found := [run for run in whole if run.job.recipe == recipe.name])
    }
    losses = {name: statistics.fmean(run.final_loss for run in found) for name, found in by_recipe.items()}
    num_seeds = max(len(found) for found in by_recipe.values())
    settings = SIZES[size]
    checks = (
        Check(
            "Every loss is finite",
            all(math.isfinite(step.loss) for run in runs for step in run.steps),
            "finite" if all(math.isfinite(step.loss) for run in runs for step in run.steps) else "not finite",
            "finite",
        ),
        *_quality_checks(losses, num_seeds),
        *(check for run in runs if run.job.kill_after is not None for check in resume_checks(run, whole)),
    )
    facts = [
        Fact(name, f"{loss:.4f}", f"nats a character on held-out text{_against(losses, name)}")
        for name, loss in losses.items()
    ]
    seeds = "one seed" if num_seeds == 1 else f"the mean of {num_seeds} seeds"
    return Report(
        title="Training under six recipes",
        summary=(
            f"A character transformer of {num_parameters / 1e6:.2f} million parameters learns Shakespeare for "
            f"{settings.num_steps} steps of {settings.num_windows * settings.context} characters under each recipe, "
            f"from the same weights and on the same batches; {seeds}."
        ),
        environment=read_environment(num_threads=num_threads),
        checks=checks,
        facts=tuple(facts),
        figures=(_held_out_curves(by_recipe), _difference_curves(by_recipe), _training_curves(by_recipe)),
        sections=(
            Section("Final losses", _losses_table(by_recipe, losses), "On held-out text, after the last step."),
            Section("Recipes", _recipes_table(tuple(find(name) for name in by_recipe))),
            Section("Settings", _settings_table(settings)),
        ),
    )


def resume_checks(killed: Run, whole: Sequence[Run]) -> tuple[Check, ...]:
    """Returns what has to hold of a run that was killed, against the uninterrupted one of its recipe and seed."""
    job = killed.job
    other = next(run for run in whole if (run.job.recipe, run.job.seed) == (job.recipe, job.seed))
    start = killed.resumed_from
    after = [] if start is None else [step for step in killed.steps if step.number > start]
    expected = {step.number: step for step in other.steps}
    differing = [step for step in after if _numbers(step) != _numbers(expected[step.number])]
    again = [step for step in killed.killed if start is not None and step.number > start]
    return (
        Check(
            f"{job.recipe}, killed after step {job.kill_after} and resumed: losses equal bit for bit",
            start is not None and len(after) >= NUM_AFTER and not differing,
            f"{len(differing)} of {len(after)} steps after step {start} differ ({len(again)} of them done twice)",
            f"none of {NUM_AFTER} or more",
        ),
        Check(
            f"{job.recipe}, killed and resumed: final held-out loss equal bit for bit",
            killed.final_loss == other.final_loss,
            f"{killed.final_loss!r} and {other.final_loss!r}",
            "equal",
        ),
    )


def _numbers(step: Step) -> tuple[float, float | None, float | None, bool]:
    return step.loss, step.held_out_loss, step.final_loss, step.was_taken


def _quality_checks(losses: dict[str, float], num_seeds: int) -> list[Check]:
    if BASELINE not in losses:
        return []
    excess = {name: loss / losses[BASELINE] - 1 for name, loss in losses.items()}
    if num_seeds == 1:
        by_chance = max((abs(excess[name]) for name in CONTROLS if name in excess), default=0.0)
        of, most = "one seed", MAX_LOSS + by_chance
        wanted = f"at most +{most:.2%}: {MAX_LOSS:.1%}, and what recipes without float8 differ by"
    else:
        of, most = f"mean of {num_seeds} seeds", MAX_LOSS
        wanted = f"at most +{most:.1%}"
    return [
        Check(
            f"Held-out loss under {name} against {BASELINE}, {of}",
            excess[name] <= most,
            f"{excess[name]:+.2%}",
            wanted,
        )
        for name in HELD_TO_IT
        if name in excess
    ]


def _against(losses: dict[str, float], name: str) -> str:
    if name == BASELINE or BASELINE not in losses:
        return ""
    return f"; {losses[name] / losses[BASELINE] - 1:+.2%} against {BASELINE}"


def _held_out_curves(by_recipe: dict[str, list[Run]]) -> Curves:
    curves = []
    for name, runs in by_recipe.items():
        points = _mean_held_out(runs)
        curves.append(Curve(name, tuple(map(float, points)), tuple(points.values())))
    return Curves(
        "Held-out loss",
        "nats a character",
        "steps",
        tuple(curves),
        "The loss on held-out text over steps, one line a recipe; the lines lie on top of each other.",
    )


def _difference_curves(by_recipe: dict[str, list[Run]]) -> Curves:
    """The same as a difference to the baseline, where the lines can be told apart."""
    baseline = _mean_held_out(by_recipe.get(BASELINE, next(iter(by_recipe.values()))))
    curves = []
    for name, runs in by_recipe.items():
        points = _mean_held_out(runs)
        curves.append(
            Curve(name, tuple(map(float, points)), tuple(100 * (points[n] / baseline[n] - 1) for n in points))
        )
    return Curves(
        f"Held-out loss against {BASELINE}",
        "%",
        "steps",
        tuple(curves),
        f"The difference of each recipe's held-out loss to that of {BASELINE}, in percent, over steps.",
        digits=2,
    )


def _mean_held_out(runs: Sequence[Run]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for run in runs:
        for step in run.steps:
            if step.held_out_loss is not None:
                found.setdefault(step.number, []).append(step.held_out_loss)
    return {number: statistics.fmean(losses) for number, losses in sorted(found.items())}


def _training_curves(by_recipe: dict[str, list[Run]]) -> Curves:
    """The training loss of the first seed, a mean for each 25 steps: a batch's own loss is mostly noise."""
    curves = []
    for name, runs in by_recipe.items():
        losses = [step.loss for step in runs[0].steps]
        ends = range(25, len(losses) + 1, 25)
        if ends:
            means = tuple(statistics.fmean(losses[end - 25 : end]) for end in ends)
            curves.append(Curve(name, tuple(map(float, ends)), means))
    return Curves(
        "Training loss, mean of 25 steps",
        "nats a character",
        "steps",
        tuple(curves),
        "The training loss of the first seed over steps, one line a recipe.",
    )


def _losses_table(by_recipe: dict[str, list[Run]], losses: dict[str, float]) -> Table:
    titles = ("held-out loss", "spread of seeds", f"against {BASELINE}", "steps skipped")
    rows = []
    for name, runs in by_recipe.items():
        finals = [run.final_loss for run in runs]
        spread = f"± {statistics.stdev(finals):.4f}" if len(finals) > 1 else "–"
        against = "–" if name == BASELINE or BASELINE not in losses else f"{losses[name] / losses[BASELINE] - 1:+.2%}"
        skipped = sum(not step.was_taken for run in runs for step in run.steps)
        rows.append((name, f"{losses[name]:.4f}", spread, against, str(skipped)))
    return Table(
        (Column("recipe"), *(Column(title, is_right=True) for title in titles)),
        tuple(rows),
        footer=("What a step takes is measured apart, in turns: benchmarks/training_step.py.",),
    )


def _recipes_table(recipes: Sequence[Recipe]) -> Table:
    return Table(
        (Column("recipe"), Column("what is computed in what", can_wrap=True)),
        tuple((recipe.name, recipe.description) for recipe in recipes),
    )


def _settings_table(settings: Settings) -> Table:
    rows = tuple((name.replace("_", " "), f"{value:g}") for name, value in asdict(settings).items())
    return Table((Column("setting"), Column("value", is_right=True)), rows)


def write_markdown(report: Report, path: Path, *, command: str) -> None:
    """Writes a report as a Markdown page, with its figures as SVG files beside it.

    Args:
        report: the report.
        path: the page; the figures are called after it.
        command: what made it.
    """
    lines = [f"# {report.title}", "", report.summary, "", f"Made by `{command}`; it is not written by hand.", ""]
    environment = report.environment
    lines += [
        f"{environment.processor}, {environment.num_cores} cores, {environment.num_threads} threads a run, "
        f"Python {environment.python}, PyTorch {torch.__version__.partition('+')[0]}.",
        "",
    ]
    checks = Table(
        (Column("what had to hold"), Column("result"), Column("measured"), Column("wanted")),
        tuple((c.name, "passed" if c.passed else "failed", c.measured, c.wanted) for c in report.checks),
    )
    for heading, text, table in [("Checks", "", checks), *((s.heading, s.text, s.table) for s in report.sections)]:
        lines += [f"## {heading}", "", *([text, ""] if text else []), *_markdown(table), ""]
    lines += ["## Curves", ""]
    for number, figure in enumerate(report.figures, 1):
        name = f"{path.stem}-{number}.svg"
        (path.parent / name).write_text(_on_white(svg(figure, LIGHT)), encoding="utf-8")
        lines += [f"![{figure.description}]({name})", ""]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _markdown(table: Table) -> list[str]:
    rules = ["---:" if column.is_right else "---" for column in table.columns]
    rows = [[column.title for column in table.columns], rules, *table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*lines, *(["", *table.footer] if table.footer else [])]


def _on_white(picture: str) -> str:
    """A picture with a white ground: a page may be shown on a dark one, where the light theme's ink cannot be read."""
    end = picture.index(">", picture.index("<svg")) + 1
    return picture[:end] + '<rect width="100%" height="100%" fill="#ffffff"/>' + picture[end:]
