"""Tables in a terminal: coloured and fitted to its width, or plain lines where the output goes elsewhere."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from narrowcast.plan.table import Column, Table
from narrowcast.report.records import Report

__all__ = ["checks_table", "facts_table", "print_table", "rich_table"]

_STYLES = {
    "applied": "green",
    "passed": "green",
    "fell back": "yellow",
    "failed": "bold red",
    "kept": "dim",
    "not a target": "dim",
}
"""Cells whose whole text is one of these words are coloured."""


def rich_table(table: Table) -> RichTable:
    """Returns `table` as rich draws it: footer lines as a caption, statuses coloured, text never read as markup."""
    drawn = RichTable(
        title=Text(table.title) if table.title else None,
        caption=Text("\n".join(table.footer)) if table.footer else None,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    for index, column in enumerate(table.columns):
        drawn.add_column(
            Text(column.title),
            justify="right" if column.is_right else "left",
            # Only the first column, which identifies the row, is broken where nothing else helps.
            no_wrap=not column.can_wrap and index > 0,
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return drawn


def print_table(table: Table, console: Console) -> None:
    """Prints `table`: coloured and fitted to its width in a terminal, as plain lines into a file or a pipe.

    Plain lines are as wide as they need to be, or as the environment's `COLUMNS` says.
    """
    if console.is_terminal:
        console.print(rich_table(table), soft_wrap=False)
    else:
        columns = os.environ.get("COLUMNS", "")
        console.out(table.to_text(int(columns) if columns.isdecimal() else None), highlight=False)


def checks_table(report: Report) -> Table:
    """Returns what had to hold and whether it does."""
    columns = (Column("what had to hold", can_wrap=True), Column("result"), Column("measured"), Column("wanted"))
    return Table(
        columns,
        tuple(
            (check.name, "passed" if check.passed else "failed", check.measured, check.wanted)
            for check in report.checks
        ),
    )


def facts_table(report: Report) -> Table:
    """Returns the numbers of a report."""
    columns = (Column("measured"), Column("value"), Column("", can_wrap=True))
    return Table(columns, tuple((fact.name, fact.value, fact.note) for fact in report.facts))
