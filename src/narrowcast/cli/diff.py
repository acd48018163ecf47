"""`narrowcast diff`: what changes on a model from one policy to another."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowcast import frameworks
from narrowcast.cli.arguments import AsJson, Fallback, FallbackOption, Model, Strict
from narrowcast.cli.inputs import open_model, read_policy
from narrowcast.cli.terminal import Terminal, reports_errors

__all__ = ["diff"]


@reports_errors
def diff(
    model: Model,
    policy_a: Annotated[str, typer.Argument(metavar="POLICY_A", help="A policy file, or one policy's name.")],
    policy_b: Annotated[str, typer.Argument(metavar="POLICY_B", help="What to compare it with.")],
    strict: Strict = True,
    fallback: FallbackOption = Fallback.SOURCE,
    as_json: AsJson = False,
) -> None:
    """List the layers of MODEL that POLICY_B treats otherwise than POLICY_A, and the bytes of each.

    Example:

      narrowcast diff my_package.models:build policy.toml policy-2.toml
    """
    terminal = Terminal(as_json=as_json)
    with terminal.working("Reading the model"):
        opened = open_model(model, weights=False)
    one, other = (
        frameworks.plan(opened, read_policy(policy), strict=strict, fallback=fallback.value)
        for policy in (policy_a, policy_b)
    )
    difference = one.diff(other)
    terminal.show(difference.table())
    terminal.data(difference.to_json())
