"""What will happen: a map bound to the tree of a model. Standard library only."""

from narrowcast.plan.bind import as_map, bind
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
    "bind",
    "format_bytes",
]
