"""`narrowcast apply`: carry a policy out and save the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowcast import frameworks
from narrowcast.cli.arguments import AsJson, Fallback, FallbackOption, Model, Policy, Strict
from narrowcast.cli.inputs import open_model, read_policy
from narrowcast.cli.terminal import Terminal, reports_errors
from narrowcast.plan.table import format_bytes

__all__ = ["apply"]


@reports_errors
def apply(
    model: Model,
    policy: Policy,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Where the model is saved.", show_default=False),
    ],
    strict: Strict = True,
    fallback: FallbackOption = Fallback.SOURCE,
    as_json: AsJson = False,
) -> None:
    """Carry POLICY out on MODEL and save the result, all of it or nothing.

    FOLDER gets model.safetensors and narrowcast.json; `narrowcast.load(model, FOLDER)` reads them back.

    Example:

      narrowcast apply my_package.models:build --policy policy.toml --out quantized
    """
    terminal = Terminal(as_json=as_json)
    with terminal.working("Loading the model"):
        opened = open_model(model, weights=True)
    with terminal.working("Applying the policy"):
        plan = frameworks.plan(opened, read_policy(policy), strict=strict, fallback=fallback.value)
        frameworks.apply(opened, plan)
    with terminal.working("Saving"):
        frameworks.save(opened, out)
    for warning in plan.warnings:
        terminal.note(f"warning: {warning}", style="yellow")
    before, after = plan.totals.bytes_before, plan.totals.bytes_after
    counts: dict[str, int] = {}
    for row in plan:
        counts[row.status.value] = counts.get(row.status.value, 0) + 1
    terminal.show(
        f"{format_bytes(before)} → {format_bytes(after)}: "
        + ", ".join(f"{number} {status}" for status, number in counts.items())
        + f". Saved in {out}"
    )
    terminal.data(
        {
            "out": str(out),
            "bytes_before": before,
            "bytes_after": after,
            "statuses": counts,
            "warnings": list(plan.warnings),
        }
    )
