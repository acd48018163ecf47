"""Training processes, several at once: started, read, killed where that is asked, and started again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from narrowcast.demo.training.loop import Step
from narrowcast.demo.training.worker import from_line
from narrowcast.errors import CheckpointError

__all__ = ["Job", "Run", "run_all"]


@dataclass(frozen=True)
class Job:
    """One training to be done.

    Args:
        recipe: the recipe's name.
        seed: the seed.
        kill_after: kills the process when it has told of this step, and starts it again.
    """

    recipe: str
    seed: int
    kill_after: int | None = None


@dataclass(frozen=True)
class Run:
    """A training that was done.

    Args:
        job: what was asked.
        steps: what each step came to; those that a killed process did and its successor did again, as done last.
        killed: what the killed process told, if one was killed.
        folder: where its last checkpoint lies.
    """

    job: Job
    steps: tuple[Step, ...]
    folder: Path
    killed: tuple[Step, ...] = field(default=())

    @property
    def resumed_from(self) -> int | None:
        """The step of the checkpoint that training went on from after a kill."""
        return next((step.resumed_from for step in self.steps if step.resumed_from is not None), None)

    @property
    def final_loss(self) -> float:
        """The held-out loss after the last step."""
        return next(step.final_loss for step in reversed(self.steps) if step.final_loss is not None)


def run_all(
    jobs: list[Job],
    *,
    size: str,
    corpus: Path,
    out: Path,
    num_processes: int,
    num_threads: int,
    on_step: Callable[[Job, Step], None] = lambda job, step: None,
) -> list[Run]:
    """Does all jobs and returns what they came to, in their order.

    Args:
        jobs: what to do.
        size: the name of the settings.
        corpus: the archive with the text.
        out: where checkpoints go, a folder each.
        num_processes: how many train at once.
        num_threads: threads of each.
        on_step: hears of every step, from several threads.

    Raises:
        CheckpointError: a process failed.
    """

    def do(job: Job) -> Run:
        name = f"{job.recipe.replace('/', '-')}-{job.seed}" + ("-killed" if job.kill_after is not None else "")
        command = [sys.executable, "-m", "narrowcast.demo.training.worker", "--recipe", job.recipe, "--size", size]
        command += ["--seed", str(job.seed), "--corpus", str(corpus), "--folder", str(out / name)]
        command += ["--threads", str(num_threads)]
        killed = _read(command, job, on_step, kill_after=job.kill_after) if job.kill_after is not None else []
        done = _read(command, job, on_step)
        # What was done again counts as done last.
        steps = {step.number: step for step in [*killed, *done]}
        return Run(job, tuple(steps[number] for number in sorted(steps)), out / name, tuple(killed))

    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(do, jobs))


def _read(
    command: list[str], job: Job, on_step: Callable[[Job, Step], None], *, kill_after: int | None = None
) -> list[Step]:
    """Runs a process to its end, or until it is killed, and returns what it told."""
    steps: list[Step] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            for line in process.stdout or ():
                steps.append(from_line(line))
                on_step(job, steps[-1])
                if steps[-1].number == kill_after:
                    process.kill()
                    break
        except BaseException:
            process.kill()
            raise
        process.wait()
        if kill_after is None and process.returncode:
            errors.seek(0)
            raise CheckpointError(
                f"Training under {job.recipe} failed",
                got={"exit status": process.returncode, "seed": job.seed},
                fix="Its last words were: " + (errors.read().strip().splitlines() or ["nothing"])[-1],
            )
    return steps
