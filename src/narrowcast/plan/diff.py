"""What one plan does otherwise than another, by path and in total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from narrowcast.plan.estimate import Totals
from narrowcast.plan.folding import fold_paths
from narrowcast.plan.plan import Plan, Row
from narrowcast.plan.table import ROOT, Column, Table, format_bytes

__all__ = ["Difference", "SiteDifference", "compare"]


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """A site that two plans treat differently.

    Args:
        path: its first path.
        old: its row in the first plan, or `None` where the first plan's model has no such site.
        new: its row in the second plan, or `None`.
    """

    path: str
    old: Row | None
    new: Row | None

    def to_json(self) -> dict[str, Any]:
        """Returns the difference as plain JSON values."""
        return {
            "path": self.path,
            "old": None if self.old is None else self.old.to_json(),
            "new": None if self.new is None else self.new.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """What two plans do otherwise; false where they do the same.

    Args:
        sites: the sites that differ, in the order of the first plan, then those that only the second has.
        old: the totals of the first plan.
        new: the totals of the second plan.
    """

    sites: tuple[SiteDifference, ...]
    old: Totals
    new: Totals

    def __bool__(self) -> bool:
        return bool(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        return self.table().to_text()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, Any]:
        """Returns the difference as plain JSON values."""
        return {
            "sites": [site.to_json() for site in self.sites],
            "old": self.old.to_json(),
            "new": self.new.to_json(),
        }

    def table(self, *, every: bool = False) -> Table:
        """Returns the sites that differ as a table, the totals below.

        Args:
            every: whether sites without parameters are shown, and each site has a row of its own. Otherwise those that
                differ in the same way and only in the numbers of their paths are one row.
        """
        columns = (
            Column("path"),
            Column("sites", is_right=True),
            Column("policy"),
            Column("becomes"),
            Column("rule"),
            Column("becomes"),
            Column("bytes", is_right=True),
            Column("become", is_right=True),
        )
        groups: dict[tuple[str, ...], list[SiteDifference]] = {}
        shown = [site for site in self.sites if every or _has_parameters(site)]
        for site in shown:
            groups.setdefault(_said(site) + ((site.path,) if every else ()), []).append(site)
        rows = []
        for said, sites in groups.items():
            old, new = (sum(getattr(getattr(s, side), "bytes_after", 0) for s in sites) for side in ("old", "new"))
            for path, count in _folded([site.path for site in sites]):
                share = count / len(sites)
                sizes = (format_bytes(round(old * share)), format_bytes(round(new * share)))
                rows.append((path or ROOT, str(count), *said[:4], *sizes))
        first, second = self.old.bytes_after, self.new.bytes_after
        change = f"{'+' if second >= first else '-'}{format_bytes(abs(second - first))}"
        hidden = len(self.sites) - len(shown)
        told = f"{len(shown):,} layer{' differs' if len(shown) == 1 else 's differ'}" + (
            f" ({hidden:,} without parameters not shown)" if hidden else ""
        )
        footer = f"{told}; {format_bytes(first)} -> {format_bytes(second)} ({change})"
        return Table(columns, tuple(rows), (footer,))


def compare(old: Plan, new: Plan) -> Difference:
    """Returns what `new` does otherwise than `old`: policies, statuses, bytes and input casts."""
    sites = []
    ours = {row.path for row in old}
    theirs = {row.path: row for row in new}
    for row in old:
        other = theirs.get(row.path)
        if other is None or _outcome(row) != _outcome(other):
            sites.append(SiteDifference(row.path, row, other))
    sites += [SiteDifference(row.path, None, row) for row in new if row.path not in ours]
    return Difference(tuple(sites), old.totals, new.totals)


def _outcome(row: Row) -> tuple[object, ...]:
    # Which rule led there is told, and is no difference by itself: the model comes out the same.
    return row.given, row.status, row.casts_inputs, row.bytes_after


def _has_parameters(difference: SiteDifference) -> bool:
    return any(row is not None and row.site.parameters for row in (difference.old, difference.new))


def _said(site: SiteDifference) -> tuple[str, ...]:
    """The cells of a site's row; sites that say the same, with the same sizes, are folded."""
    size = [str(row.bytes_after) if row is not None else "" for row in (site.old, site.new)]
    return (_policy(site.old), _policy(site.new), _rule(site.old), _rule(site.new), *size)


def _policy(row: Row | None) -> str:
    if row is None:
        return "(no such layer)"
    return row.given.name + (" (casts inputs)" if row.casts_inputs else "")


def _rule(row: Row | None) -> str:
    return "" if row is None or row.rule is None else row.rule or ROOT


def _folded(paths: list[str]) -> list[tuple[str, int]]:
    shapes: dict[str, list[str]] = {}
    for path in paths:
        shapes.setdefault("".join("#" if c.isdigit() else c for c in path), []).append(path)
    found = []
    for group in shapes.values():
        one = fold_paths(group)
        found += [(one[0], len(group))] if len(one) == 1 else [(path, 1) for path in group]
    return found
