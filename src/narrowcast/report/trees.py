"""A model's tree as a table: how one learns the paths that rules are written for."""

from __future__ import annotations

from narrowcast.plan.table import Column, Table, format_bytes
from narrowcast.plan.tree import Site, Tree

__all__ = ["tree_table"]


def tree_table(tree: Tree, *, every: bool = False) -> Table:
    """Returns one row a site.

    Args:
        tree: the tree.
        every: whether containers and sites without parameters are shown; otherwise only the last line counts them.
    """
    columns = (
        Column("path"),
        Column("kind"),
        Column("class"),
        Column("parameters", can_wrap=True),
        Column("policy", can_wrap=True),
        Column("bytes", is_right=True),
    )
    # Most trees carry no policy yet, and need no column for it.
    cells = [0, 1, 2, 3, 4, 5] if any(site.policy is not None for site in tree) else [0, 1, 2, 3, 5]
    shown = [site for site in tree if every or site.parameters or site.policy is not None] or list(tree)
    rows = [
        (
            _paths(site),
            " and ".join(site.kinds),
            site.class_name.rsplit(".", 1)[-1],
            ", ".join(f"{p.name} {_shape(p.shape)} {p.dtype}" for p in site.parameters),
            site.policy.name or "" if site.policy is not None else "",
            format_bytes(site.num_bytes) if site.parameters else "",
        )
        for site in shown
    ]
    num_parameters = sum(parameter.num_elements for site in tree for parameter in site.parameters)
    footer = f"{tree.name}: {len(tree):,} sites, {num_parameters:,} parameters, {format_bytes(tree.num_bytes)}"
    hidden = len(tree) - len(shown)
    if hidden:
        footer += f"; {hidden:,} without parameters not shown"
    return Table(
        tuple(columns[cell] for cell in cells), tuple(tuple(row[cell] for cell in cells) for row in rows), (footer,)
    )


def _paths(site: Site) -> str:
    """The path; the root has a name here, and other paths of the same site follow."""
    first, *others = site.paths
    return (first or "(root)") + (f" = {', '.join(others)}" if others else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"
