"""`narrowcast explain`: why a layer gets the policy it gets."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowcast import frameworks
from narrowcast.cli.arguments import AsJson, Fallback, FallbackOption, Model, Policy
from narrowcast.cli.inputs import open_model, read_policy
from narrowcast.cli.terminal import Terminal, reports_errors
from narrowcast.plan.table import ROOT

__all__ = ["explain"]


@reports_errors
def explain(
    model: Model,
    path: Annotated[str, typer.Argument(metavar="PATH", help="The layer's path, as `narrowcast plan MODEL` shows it.")],
    policy: Policy,
    fallback: FallbackOption = Fallback.SOURCE,
    as_json: AsJson = False,
) -> None:
    """Say which rule won at PATH, which lost and why, what was asked and what is given.

    A policy with findings is explained as well: they are told as warnings.

    Example:

      narrowcast explain my_package.models:build encoder/layer/0/attention/query --policy policy.toml
    """
    terminal = Terminal(as_json=as_json)
    with terminal.working("Reading the model"):
        opened = open_model(model, weights=False)
    plan = frameworks.plan(opened, read_policy(policy), strict=False, fallback=fallback.value)
    explanation = plan.explain("" if path == ROOT else path)
    for warning in plan.warnings:
        terminal.note(f"warning: {warning}", style="yellow")
    terminal.show(explanation)
    terminal.data(explanation.to_json())
