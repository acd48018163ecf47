"""`narrowcast compare`: how far a saved model is from the model it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowcast import frameworks
from narrowcast.cli.arguments import AsJson, Html, Model
from narrowcast.cli.inputs import call_address, open_model
from narrowcast.cli.terminal import DOES_NOT_HOLD, Terminal, reports_errors
from narrowcast.errors import ModelError, NarrowcastError
from narrowcast.report import Check, page
from narrowcast.report.comparison import comparison_report, layers_table

__all__ = ["compare"]


@reports_errors
def compare(
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The folder that `narrowcast apply MODEL` wrote.", show_default=False),
    ],
    inputs: Annotated[
        str,
        typer.Option(
            "--inputs",
            metavar="package.module:callable",
            help="Takes no arguments; returns a batch (tensor, tuple or mapping) or a list of batches.",
            show_default=False,
        ),
    ],
    max_error: Annotated[
        float | None,
        typer.Option("--max-error", min=0.0, help="Exit with 1 where the outputs' relative error is larger."),
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Run MODEL and what was saved from it on the same inputs: error by layer and of the outputs, size, latency.

    Own error: the layer on the original model's inputs. Accumulated error: the layer within its own model. Both are
    relative, by the norm of all its outputs. Keep the layers whose own error is largest.

    Example:

      narrowcast compare my_package.models:build quantized --inputs my_package.data:batches --max-error 0.05
    """
    terminal = Terminal(as_json=as_json)
    with terminal.working("Loading the models"):
        reference = open_model(model, weights=True)
        other = frameworks.load(open_model(model, weights=True), out)
    from narrowcast.observe import compare as comparing

    comparing.check_origin(reference, other)
    batches = comparing.each_batch(call_address(inputs))
    with terminal.working("Running both models"):
        try:
            found = comparing.compare(reference, other, batches)
        except NarrowcastError:
            raise
        except Exception as error:
            raise ModelError(
                f"Model failed on the inputs: {type(error).__name__}: {error}",
                got={"inputs": inputs},
                expected="batches that the model takes: a tensor, a tuple of arguments or a mapping of keywords",
            ) from error
    checks = [
        Check(
            "Every output is finite", found.outputs.is_finite, "finite" if found.outputs.is_finite else "not", "finite"
        )
    ]
    if max_error is not None:
        measured = found.outputs.relative
        checks.append(
            Check("Relative error of the outputs", measured <= max_error, f"{measured:.5f}", f"at most {max_error}")
        )
    report = comparison_report(found, title=f"{model} and {out}", checks=tuple(checks))
    terminal.show(layers_table(found))
    terminal.show("")
    for fact in report.facts:
        terminal.show(f"{fact.name}: {fact.value} ({fact.note})")
    if html is not None:
        terminal.write_page(page(report), html)
    terminal.data({**found.to_json(), "checks": report.to_json()["checks"], "passed": report.passed})
    if not report.passed:
        failed = "; ".join(
            f"{check.name}: {check.measured}, wanted {check.wanted}" for check in checks if not check.passed
        )
        terminal.note(f"error: {failed}", style="bold red")
        raise typer.Exit(DOES_NOT_HOLD)
