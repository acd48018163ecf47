"""A table as a frozen value: what plans, differences and reports are shown as, in text and in HTML."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass

__all__ = ["Column", "Table", "format_bytes"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        title: what stands above it.
        is_right: numbers are set to the right.
        can_wrap: long cells may be broken over several lines where the width is limited.
    """

    title: str
    is_right: bool = False
    can_wrap: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text under columns, with a title and closing lines.

    Args:
        columns: the columns.
        rows: one cell of text for each column. A number is formatted before it comes here.
        footer: lines that stand below the table.
        title: a line that stands above it.

    Raises:
        ValueError: a row has not as many cells as there are columns.

    Example:
        >>> table = Table((Column("path"), Column("bytes", is_right=True)), (("head", "24"),), ("1 site",))
        >>> print(table.to_text())
        path  bytes
        ────  ─────
        head     24
        1 site
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: tuple[str, ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"A row has {len(row)} cells where the table has {len(self.columns)} columns: {row!r}")

    def to_text(self, width: int | None = None) -> str:
        """Returns the table as lines of plain text, without blanks at their ends; the footer alone where no row is.

        Args:
            width: the most characters a line should have; columns that `can_wrap` are narrowed to meet it, down to 12
                characters each. `None`: as wide as the cells.
        """
        widths = self._widths(width)
        lines = [self.title] if self.title else []
        if self.rows or not self.footer:
            lines += self._lines([column.title for column in self.columns], widths)
            lines.append("  ".join("─" * w for w in widths))
        for row in self.rows:
            lines += self._lines(list(row), widths)
        lines += self.footer
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.to_text()

    def to_html(self) -> str:
        """Returns the table as one HTML `<table>`, every cell escaped, with the footer as paragraphs after it."""
        align = [
            ' style="text-align:right"' if column.is_right else ' style="text-align:left"' for column in self.columns
        ]
        parts = ['<table class="narrowcast">']
        if self.title:
            parts.append(f"<caption>{html.escape(self.title)}</caption>")
        heads = "".join(f"<th{a}>{html.escape(c.title)}</th>" for a, c in zip(align, self.columns, strict=True))
        parts.append(f"<thead><tr>{heads}</tr></thead>")
        parts.append("<tbody>")
        for row in self.rows:
            cells = "".join(f"<td{a}>{html.escape(cell)}</td>" for a, cell in zip(align, row, strict=True))
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</tbody></table>")
        parts += [f"<p>{html.escape(line)}</p>" for line in self.footer]
        return "\n".join(parts)

    def _widths(self, width: int | None) -> list[int]:
        cells = [[column.title for column in self.columns], *self.rows]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(len(self.columns))]
        if width is None:
            return widths
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        while excess > 0:
            # Take one character at a time off the widest column that may wrap: simple, and even between equals.
            wide = [i for i, column in enumerate(self.columns) if column.can_wrap and widths[i] > 12]
            if not wide:
                break
            widths[max(wide, key=lambda i: widths[i])] -= 1
            excess -= 1
        return widths

    def _lines(self, row: list[str], widths: list[int]) -> list[str]:
        blocks = [
            textwrap.wrap(cell, w) or [""] if len(cell) > w else [cell] for cell, w in zip(row, widths, strict=True)
        ]
        lines = []
        for number in range(max(map(len, blocks), default=0)):
            cells = [block[number] if number < len(block) else "" for block in blocks]
            aligned = [
                cell.rjust(w) if column.is_right else cell.ljust(w)
                for cell, w, column in zip(cells, widths, self.columns, strict=True)
            ]
            lines.append("  ".join(aligned))
        return lines


ROOT = "(root)"
"""How tables call the model itself, whose path is empty."""


def format_shape(shape: tuple[int, ...]) -> str:
    """Returns a shape as it is read aloud.

    Example:
        >>> format_shape((256, 64)), format_shape(())
        ('256×64', 'scalar')
    """
    return "×".join(map(str, shape)) if shape else "scalar"


def format_bytes(num_bytes: int) -> str:
    """Returns a size in decimal units with three or four digits, as file managers show it.

    Example:
        >>> [format_bytes(n) for n in (0, 999, 1000, 90_870_000, 1_234_567_890)]
        ['0 B', '999 B', '1.0 kB', '90.9 MB', '1.2 GB']
    """
    if abs(num_bytes) < 1000:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        # 999.95 would be shown as 1000.0.
        if abs(size) < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} PB"
