"""Fitting a table to a width: what does not fit beside the rest goes below it, as numbered notes."""

from __future__ import annotations

from narrowcast.plan.table import Column, Table

__all__ = ["fit", "natural_width"]

_GAP = 2
_LONG = 20
"""Only columns wider than this are worth a note: it takes a line below, and the reader's eye."""


def fit(table: Table, width: int) -> Table:
    """Returns the table, narrowed as far as it must be to be `width` characters wide.

    The first column and columns of numbers stay. Those that may be wrapped are moved first, then the widest, one by
    one, until the table fits or none is left. Rows with the same words share a note.

    Args:
        table: the table.
        width: the most characters of a line.

    Example:
        >>> columns = (Column("path"), Column("reason", can_wrap=True))
        >>> print(fit(Table(columns, (("a", "the CPU has none of it"), ("b", ""))), 20))
        path  note
        ────  ────
        a     [1]
        b
        [1] reason: the CPU has none of it
    """
    movable = [
        index
        for index, column in enumerate(table.columns)
        if index > 0 and not column.is_right and _width(table, index) > _LONG
    ]
    movable.sort(key=lambda index: (not table.columns[index].can_wrap, -_width(table, index)))
    moved: list[int] = []
    fitted = table
    while natural_width(fitted) > width and movable:
        moved.append(movable.pop(0))
        # All that may be wrapped go together: half of a reason is no reason.
        while movable and table.columns[moved[-1]].can_wrap and table.columns[movable[0]].can_wrap:
            moved.append(movable.pop(0))
        fitted = _with_notes(table, sorted(moved))
    return fitted


def natural_width(table: Table) -> int:
    """Returns how many characters the rows of a table need, its title and footer aside."""
    return sum(_width(table, index) + _GAP for index in range(len(table.columns))) - _GAP


def _width(table: Table, index: int) -> int:
    return max(len(table.columns[index].title), *(len(row[index]) for row in table.rows), 0)


def _with_notes(table: Table, moved: list[int]) -> Table:
    notes: dict[str, str] = {}
    rows = []
    for row in table.rows:
        text = "; ".join(f"{table.columns[index].title}: {row[index]}" for index in moved if row[index])
        mark = notes.setdefault(text, f"[{len(notes) + 1}]") if text else ""
        rows.append((*(cell for index, cell in enumerate(row) if index not in moved), mark))
    columns = (*(column for index, column in enumerate(table.columns) if index not in moved), Column("note"))
    return Table(
        columns, tuple(rows), (*(f"{mark} {text}" for text, mark in notes.items()), *table.footer), table.title
    )
