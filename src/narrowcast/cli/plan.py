"""`narrowcast plan`: the tree of a model, or what a policy will do to it."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowcast import frameworks
from narrowcast.cli.arguments import AsJson, Fallback, FallbackOption, Html, Model, OptionalPolicy, Strict
from narrowcast.cli.inputs import open_model, read_policy
from narrowcast.cli.terminal import Terminal, reports_errors
from narrowcast.plan.plan import Plan
from narrowcast.plan.tree import Tree
from narrowcast.report import Report, Section, page, read_environment

__all__ = ["plan"]


@reports_errors
def plan(
    model: Model,
    policy: OptionalPolicy = None,
    every: Annotated[bool, typer.Option("--all", help="Show every layer, containers and repeated ones too.")] = False,
    strict: Strict = True,
    fallback: FallbackOption = Fallback.SOURCE,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show what POLICY will do to MODEL, layer by layer, before anything moves; without POLICY, the layers themselves.

    The paths in the first column are what rules are written for. No weights are loaded.

    Examples:

      narrowcast plan my_package.models:build

      narrowcast plan my_package.models:build --policy int8

      narrowcast plan ./my-hf-folder --policy policy.toml --json
    """
    terminal = Terminal(as_json=as_json)
    with terminal.working("Reading the model"):
        tree = frameworks.tree(opened := open_model(model, weights=False))
    found: Tree | Plan = tree
    if policy is not None:
        with terminal.working("Binding the policy"):
            found = frameworks.plan(opened, read_policy(policy), strict=strict, fallback=fallback.value)
        for warning in found.warnings:
            terminal.note(f"warning: {warning}", style="yellow")
    table = found.table(every=every)
    terminal.show(table)
    if html is not None:
        title = f"{tree.name}: layers" if policy is None else f"{tree.name}: plan for {policy}"
        report = Report(
            title, table.footer[0] if table.footer else "", read_environment(), sections=(Section("Layers", table),)
        )
        terminal.write_page(page(report), html)
    terminal.data(found.to_json())
