"""A plan as a table: what carries nothing left out, layers that differ only in their numbers folded into one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from narrowcast.plan.carrier import Status
from narrowcast.plan.folding import fold, fold_paths
from narrowcast.plan.table import ROOT, Column, Table, format_bytes

if TYPE_CHECKING:
    from narrowcast.plan.plan import Plan, Row

__all__ = ["overview"]

_COLUMNS = (
    Column("path"),
    Column("sites", is_right=True),
    Column("kind"),
    Column("policy"),
    Column("status"),
    Column("rule", can_wrap=True),
    Column("before", is_right=True),
    Column("after", is_right=True),
    Column("notes"),
)


def overview(plan: Plan, *, every: bool = False) -> Table:
    """Returns the plan as a table. See `Plan.table`.

    Kernels and reasons are long and repeat themselves: they stand below the table, once, as numbered notes.
    """
    shown = [row for row in plan if every or row.site.parameters or _is_told(row)]
    groups = [[row] for row in shown] if every else _fold(shown)
    notes: dict[str, int] = {}
    cells = [_cells(group, notes) for group in groups]
    # A column in which nothing stands would only take room.
    used = [i for i in range(len(_COLUMNS)) if i in (0, 2, 3, 4) or any(_says_something(i, row[i]) for row in cells)]
    rows = tuple(tuple(row[i] for i in used) for row in cells)
    footer = (*(f"{number}  {note}" for note, number in notes.items()), *_footer(plan, shown))
    return Table(tuple(_COLUMNS[i] for i in used), rows, footer, f"Plan of {plan.tree.name}")


def _is_told(row: Row) -> bool:
    """Whether a site without parameters says something that the reader would miss."""
    return row.casts_inputs or (row.rule is not None and row.rule in row.site.paths)


def _says_something(column: int, cell: str) -> bool:
    return cell not in ("", "1") if _COLUMNS[column].title == "sites" else bool(cell)


def _cells(group: Sequence[Row], notes: dict[str, int]) -> tuple[str, ...]:
    first = group[0]
    before, after = (sum(row.bytes_before for row in group), sum(row.bytes_after for row in group))
    path = fold_paths([row.path for row in group])[0] if len(group) > 1 else first.path
    others = [other for other in first.site.paths if other != first.path] if len(group) == 1 else []
    return (
        (path or ROOT) + (f" = {', '.join(others)}" if others else ""),
        str(len(group)),
        " and ".join(first.site.kinds),
        first.given.name + (" (casts inputs)" if first.casts_inputs else ""),
        first.status.value,
        "" if first.rule is None else first.rule or ROOT,
        format_bytes(before) if first.site.parameters else "",
        format_bytes(after) if first.site.parameters else "",
        " ".join(str(notes.setdefault(note, len(notes) + 1)) for note in _notes(first)),
    )


def _notes(row: Row) -> list[str]:
    changes = row.replaces and row.replaces != row.kernel
    return [text for text in (f"{row.kernel}, for {row.replaces}" if changes else "", row.reason) if text]


def _footer(plan: Plan, shown: Sequence[Row]) -> tuple[str, ...]:
    counts = {status: sum(row.status is status for row in shown) for status in Status}
    told = ", ".join(f"{count:,} {status.value}" for status, count in counts.items() if count)
    num_hidden = len(plan) - len(shown)
    hidden = f"; {num_hidden:,} without parameters not shown" if num_hidden else ""
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    return (f"{len(shown):,} layers: {told or 'none with parameters'}{hidden}", *plan.totals.lines(), *warnings)


def _fold(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows that say the same of paths which differ only in their numbers."""
    return fold(rows, path=lambda row: row.path, alike=_said)


def _said(row: Row) -> tuple[object, ...]:
    """What rows must have in common to be folded."""
    shapes = tuple(parameter.shape for parameter in row.site.parameters)
    shared = row.path if len(row.site.paths) > 1 else None  # a shared layer shows all its paths
    return (row.site.kinds, row.given, row.status, row.rule, row.reason, row.kernel, row.casts_inputs, shapes, shared)
