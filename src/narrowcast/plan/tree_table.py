"""A model's tree as a table: how one learns the paths that rules are written for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from narrowcast.plan.folding import fold, fold_paths
from narrowcast.plan.table import ROOT, Column, Table, format_bytes, format_shape

if TYPE_CHECKING:
    from narrowcast.plan.tree import Site, Tree

__all__ = ["tree_table"]

_COLUMNS = (
    Column("path"),
    Column("layers", is_right=True),
    Column("kind"),
    Column("class"),
    Column("parameters", can_wrap=True),
    Column("policy", can_wrap=True),
    Column("bytes", is_right=True),
)


def tree_table(tree: Tree, *, every: bool = False) -> Table:
    """Returns one row a layer, layers that differ only in the numbers of their paths one row. See `Tree.table`."""
    shown = [site for site in tree if every or site.parameters or site.policy is not None] or list(tree)
    groups = [[site] for site in shown] if every else fold(shown, path=lambda site: site.path, alike=_said)
    cells = [_cells(group) for group in groups]
    # A column in which nothing stands would only take room.
    used = [i for i, column in enumerate(_COLUMNS) if column.title != "policy" or any(row[i] for row in cells)]
    if all(len(group) == 1 for group in groups):
        used.remove(1)
    return Table(
        tuple(_COLUMNS[i] for i in used),
        tuple(tuple(row[i] for i in used) for row in cells),
        (_footer(tree, num_hidden=len(tree) - len(shown)),),
    )


def _said(site: Site) -> tuple[object, ...]:
    """What layers must have in common to be folded."""
    shared = site.path if len(site.paths) > 1 else None  # a shared layer shows all its paths
    return (site.kinds, site.class_name, site.parameters, site.policy, shared)


def _cells(group: Sequence[Site]) -> tuple[str, ...]:
    first = group[0]
    path = fold_paths([site.path for site in group])[0]
    others = first.paths[1:]
    return (
        (path or ROOT) + (f" = {', '.join(others)}" if others else ""),
        str(len(group)),
        " and ".join(first.kinds),
        first.class_name.rsplit(".", 1)[-1],
        ", ".join(f"{p.name} {format_shape(p.shape)} {p.dtype}" for p in first.parameters),
        (first.policy.name or "") if first.policy is not None else "",
        format_bytes(sum(site.num_bytes for site in group)) if first.parameters else "",
    )


def _footer(tree: Tree, *, num_hidden: int) -> str:
    num_parameters = sum(parameter.num_elements for site in tree for parameter in site.parameters)
    hidden = f"; {num_hidden:,} without parameters not shown" if num_hidden else ""
    return f"{tree.name}: {len(tree):,} layers, {num_parameters:,} parameters, {format_bytes(tree.num_bytes)}{hidden}"
