"""What will happen: a map bound to the tree of a model. Standard library only."""

from narrowcast.plan.carrier import Carrier, Status, Verdict
from narrowcast.plan.plan import Loser, Plan, Row
from narrowcast.plan.tree import KINDS, Member, Parameter, Site, Tree

__all__ = ["KINDS", "Carrier", "Loser", "Member", "Parameter", "Plan", "Row", "Site", "Status", "Tree", "Verdict"]
