"""What every verb does with its output: results to standard output, the rest to standard error, no tracebacks."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from narrowcast.errors import NarrowcastError
from narrowcast.plan.table import Table
from narrowcast.report.terminal import print_table

__all__ = ["DOES_NOT_HOLD", "Terminal", "reports_errors"]

DOES_NOT_HOLD = 1
"""The exit status where what was asked does not hold. Wrong usage is 2, which typer gives."""

Parameters = ParamSpec("Parameters")
_AS_OPTION = ("plan with strict=False", "give --no-strict")
"""What an error advises in Python, and what that is on the command line."""


class Terminal:
    """Where a verb writes.

    Args:
        as_json: whether standard output gets one JSON value and nothing else.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def show(self, value: object) -> None:
        """Prints a table, or the text of anything else, for people; nothing where JSON is asked for."""
        if self.as_json:
            return
        if isinstance(value, Table):
            print_table(value, self.out)
        else:
            self.out.print(Text(str(value)))

    def data(self, value: Any) -> None:
        """Prints a JSON value where JSON is asked for; nothing for people."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def note(self, text: str, *, style: str = "dim") -> None:
        """Prints a remark to standard error."""
        self.err.print(Text(text, style=style))

    def working(self, what: str) -> AbstractContextManager[object]:
        """Shows that something is going on, on standard error, until the context ends."""
        if self.err.is_terminal:
            return self.err.status(what + " …")
        return nullcontext()

    def write_page(self, text: str, file: Path) -> None:
        """Writes an HTML page.

        Raises:
            NarrowcastError: the file cannot be written.
        """
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise NarrowcastError(
                f"Page cannot be written: {error.strerror or error}",
                got={"file": str(file)},
                fix="Give a file in a folder that exists and can be written to",
            ) from None
        self.note(f"Wrote {file}")

    def step(self, what: str) -> AbstractContextManager[object]:
        """The same for a step of a long job, which is named in a log too."""
        self.note(what)
        return self.working(what)


def reports_errors(verb: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Makes a verb say what `NarrowcastError` says, on standard error and without a traceback, and exit with 1.

    Where JSON is asked for, standard output has ``{"error": {...}}`` with the parts of the error.
    """

    @functools.wraps(verb)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except NarrowcastError as error:
            terminal = Terminal(as_json=bool(kwargs.get("as_json")))
            terminal.data({"error": _parts(error)})
            terminal.err.print(Text("error: ", style="bold red") + Text(str(error).replace(*_AS_OPTION)))
            raise typer.Exit(DOES_NOT_HOLD) from None

    return run


def _parts(error: NarrowcastError) -> dict[str, Any]:
    return {
        "class": type(error).__name__,
        "message": str(error).replace(*_AS_OPTION),
        "problem": error.problem,
        "got": {name: repr(value) for name, value in error.got.items()},
        "expected": error.expected,
        "suggestion": error.suggestion,
        "fix": error.fix.replace(*_AS_OPTION),
        "findings": list(getattr(error, "findings", getattr(error, "differences", ()))),
    }
