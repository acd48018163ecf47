"""`narrowcast demo`: the main job on a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.arguments import AsJson
from narrowcast.cli.inputs import need_torch
from narrowcast.cli.terminal import DOES_NOT_HOLD, Terminal, reports_errors
from narrowcast.report.terminal import checks_table, facts_table

__all__ = ["demo"]


@reports_errors
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the report and the model go.")
    ] = Path("demo-output"),
    budget_s: Annotated[
        float, typer.Option("--budget", min=0.0, help="The most seconds spent on measuring latency.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Quantize a real sentence encoder: plan, apply, measure, save, reload in a new process, report.

    Needs the packages of the extra `demo`, and two that hold the encoder and the documents; what is missing is said.
    """
    terminal = Terminal(as_json=as_json)
    need_torch()
    from narrowcast.demo.job import Steps, run

    report = run(out, Steps(say=_apart(terminal), working=terminal.step), budget_s=budget_s)
    terminal.show(facts_table(report))
    terminal.show("")
    terminal.show(checks_table(report))
    terminal.data(report.to_json())
    terminal.note(f"Wrote {out / 'report.html'}")
    if not report.passed:
        terminal.note("error: a check failed", style="bold red")
        raise typer.Exit(DOES_NOT_HOLD)


def _apart(terminal: Terminal) -> Callable[[object], None]:
    """Shows each result with an empty line after it."""

    def say(value: object) -> None:
        terminal.show(value)
        terminal.show("")

    return say
