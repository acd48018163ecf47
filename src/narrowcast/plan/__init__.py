"""What will happen: a map bound to the tree of a model. Standard library only."""

from typing import TYPE_CHECKING

from narrowcast.lazy import lazily

if TYPE_CHECKING:
    from narrowcast.plan.bind import as_map
    from narrowcast.plan.carrier import Carrier, Status, Verdict
    from narrowcast.plan.diff import Difference, SiteDifference
    from narrowcast.plan.estimate import Left, Share, Totals
    from narrowcast.plan.explain import Explanation
    from narrowcast.plan.plan import Loser, Plan, Row
    from narrowcast.plan.table import Column, Table, format_bytes
    from narrowcast.plan.tree import KINDS, Member, Parameter, Site, Tree

__all__ = [
    "KINDS",
    "Carrier",
    "Column",
    "Difference",
    "Explanation",
    "Left",
    "Loser",
    "Member",
    "Parameter",
    "Plan",
    "Row",
    "Share",
    "Site",
    "SiteDifference",
    "Status",
    "Table",
    "Totals",
    "Tree",
    "Verdict",
    "as_map",
    "format_bytes",
]

# `bind`, the verb of this package, is imported from its own file, which has the same name.
_HOMES = {
    "bind": ("as_map",),
    "carrier": ("Carrier", "Status", "Verdict"),
    "diff": ("Difference", "SiteDifference"),
    "estimate": ("Left", "Share", "Totals"),
    "explain": ("Explanation",),
    "plan": ("Loser", "Plan", "Row"),
    "table": ("Column", "Table", "format_bytes"),
    "tree": ("KINDS", "Member", "Parameter", "Site", "Tree"),
}
__getattr__ = lazily(__name__, {name: f"{__name__}.{file}" for file, names in _HOMES.items() for name in names})
