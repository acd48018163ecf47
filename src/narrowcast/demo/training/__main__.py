"""``python -m narrowcast.demo.training``: what `make train` and `make train-report` run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from narrowcast.demo.training.job import jobs_for, run
from narrowcast.demo.training.loop import SIZES, Step
from narrowcast.demo.training.report import write_markdown
from narrowcast.demo.training.runs import Job
from narrowcast.errors import NarrowcastError
from narrowcast.report.terminal import checks_table, print_table


def main(arguments: list[str] | None = None) -> int:
    """Trains, reports, and returns 0 where every check holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m narrowcast.demo.training", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the archive with the text")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="where reports and checkpoints go")
    parser.add_argument("--size", choices=sorted(SIZES), default="large")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--markdown", type=Path, help="a Markdown page to write as well")
    given = parser.parse_args(arguments)
    out, err = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    began = time.monotonic()
    try:
        with _Bars(err, given.seeds, SIZES[given.size].num_steps) as bars:
            report = run(given.out, given.corpus, size=given.size, num_seeds=given.seeds, on_step=bars.see)
    except NarrowcastError as error:
        err.print(f"error: {error}", markup=False, style="bold red")
        return 1
    out.print(report.summary, markup=False)
    for section in report.sections[:1]:
        out.print()
        print_table(section.table, out)
    out.print()
    print_table(checks_table(report), out)
    if given.markdown is not None:
        command = "make train-report" if given.size == "small" else "make train"
        write_markdown(report, given.markdown, command=command)
    err.print(
        f"Took {time.monotonic() - began:.0f} s. Wrote {given.out / 'report.html'} and {given.out / 'observed.html'}"
    )
    return 0 if report.passed else 1


class _Bars:
    """A bar for each run; into a file or a pipe, a line whenever the held-out loss was measured."""

    def __init__(self, console: Console, num_seeds: int, num_steps: int) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks = {
            job: self._progress.add_task(_name(job), total=num_steps, start=False, loss="")
            for job in jobs_for(num_seeds, num_steps)
        }

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def see(self, job: Job, step: Step) -> None:
        """Shows one more step."""
        task = self._tasks[job]
        self._progress.start_task(task)
        if step.held_out_loss is not None:
            self._progress.update(task, loss=f"{step.held_out_loss:.4f}")
            if not self._console.is_terminal:
                self._console.print(f"{_name(job)}: step {step.number}, held-out loss {step.held_out_loss:.4f}")
        if step.resumed_from is not None and not self._console.is_terminal:
            self._console.print(f"{_name(job)}: resumed from step {step.resumed_from}")
        self._progress.update(task, completed=step.number)


def _name(job: Job) -> str:
    return f"{job.recipe}, seed {job.seed}" + (", killed and resumed" if job.kill_after is not None else "")


if __name__ == "__main__":
    sys.exit(main())
