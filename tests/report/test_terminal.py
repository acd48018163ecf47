from __future__ import annotations

import io

import pytest
from rich.console import Console

from narrowcast.plan.table import Column, Table
from narrowcast.report.terminal import checks_table, facts_table, print_table
from tests.report.samples import REPORT, TABLE


def _printed(*, is_terminal: bool, width: int = 60) -> str:
    buffer = io.StringIO()
    print_table(TABLE, Console(file=buffer, force_terminal=is_terminal, width=width, color_system="truecolor"))
    return buffer.getvalue()


def test_table_into_a_pipe_is_its_plain_text() -> None:
    assert _printed(is_terminal=False) == TABLE.to_text() + "\n"


def test_table_into_a_pipe_is_not_cut_to_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "encoder/<0>  applied" in _printed(is_terminal=False, width=10)


def test_table_into_a_pipe_is_fitted_where_columns_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    table = Table((Column("path"), Column("reason", can_wrap=True)), (("a", "so that it is longer than a line"),))
    buffer = io.StringIO()
    print_table(table, Console(file=buffer, force_terminal=False))
    assert buffer.getvalue() == table.to_text(30) + "\n"
    assert max(map(len, buffer.getvalue().splitlines())) <= 30


def test_status_is_coloured_in_a_terminal() -> None:
    assert "\x1b[32mapplied" in _printed(is_terminal=True)


def test_cells_are_never_read_as_markup() -> None:
    buffer = io.StringIO()
    table = Table((Column("[bold]path"),), (("[red]x[/red]",),), ("[dim]footer",))
    print_table(table, Console(file=buffer, force_terminal=True, width=60))
    assert "[red]x[/red]" in buffer.getvalue()
    assert "[dim]footer" in buffer.getvalue()


def test_checks_are_a_table() -> None:
    assert checks_table(REPORT).rows[1] == ("Faster", "failed", "0.9 ×", "faster")


def test_facts_are_a_table() -> None:
    assert facts_table(REPORT).rows == (("size", "24 B", "from 96 B"),)
