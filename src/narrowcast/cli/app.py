"""The command `narrowcast` and its verbs."""

from __future__ import annotations

from typing import Annotated

import typer

import narrowcast
from narrowcast.cli.apply import apply
from narrowcast.cli.compare import compare
from narrowcast.cli.demo import demo
from narrowcast.cli.diff import diff
from narrowcast.cli.explain import explain
from narrowcast.cli.plan import plan

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback means a defect of narrowcast: it should be short enough to paste, and show no one's data.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for verb in (plan, explain, diff, apply, compare, demo):
    app.command()(verb)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(narrowcast.__version__)
        raise typer.Exit


@app.callback()
def narrowcast_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One map decides what every layer of a model computes in, stores and is quantized to.

    MODEL is [bold]package.module:callable[/bold] (the callable takes no arguments and returns the model; the current
    folder is searched first) or a [bold]Hugging Face folder[/bold] (config.json and weights; needs transformers).

    POLICY is a policy file (.toml or .json) or the name of one policy, such as [bold]int8[/bold], for every layer that
    can carry it.

    Exit status: 0 done, 1 what was asked does not hold, 2 wrong usage.
    """
