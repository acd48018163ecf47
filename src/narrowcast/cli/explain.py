"""`narrowcast explain`: why a layer gets the policy it gets."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowcast import frameworks
from narrowcast.cli.arguments import AsJson, Fallback, FallbackOption, Model, Policy, Strict
from narrowcast.cli.inputs import open_model, read_policy
from narrowcast.cli.terminal import Terminal, reports_errors

__all__ = ["explain"]


@reports_errors
def explain(
    model: Model,
    path: Annotated[str, typer.Argument(metavar="PATH", help="The layer's path, as `narrowcast plan MODEL` shows it.")],
    policy: Policy,
    strict: Strict = True,
    fallback: FallbackOption = Fallback.SOURCE,
    as_json: AsJson = False,
) -> None:
    """Say which rule won at PATH, which lost and why, what was asked and what is given.

    Example:

      narrowcast explain my_package.models:build encoder/layer/0/attention/query --policy policy.toml
    """
    terminal = Terminal(as_json=as_json)
    with terminal.working("Reading the model"):
        opened = open_model(model, weights=False)
    explanation = frameworks.plan(opened, read_policy(policy), strict=strict, fallback=fallback.value).explain(path)
    terminal.show(explanation)
    terminal.data(explanation.to_json())
