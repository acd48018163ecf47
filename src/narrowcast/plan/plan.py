"""The plan: a map bound to a tree, one frozen row a site.

Everything that follows (applying, saving, exporting, explaining) reads the plan and never asks the map again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, deserialize, serialize
from narrowcast.errors import PolicyTypeError
from narrowcast.plan.carrier import Status
from narrowcast.plan.estimate import Totals, total
from narrowcast.plan.table import Table
from narrowcast.plan.tree import Site, Tree

if TYPE_CHECKING:
    from narrowcast.plan.diff import Difference
    from narrowcast.plan.explain import Explanation

__all__ = ["Loser", "Plan", "Row"]


@dataclass(frozen=True, slots=True)
class Loser:
    """A rule that matched a site and did not win.

    Args:
        rule: its key.
        policy: the policy it would have given.
        reason: why it lost (`an exact key wins over patterns`, `keep wins over other patterns`).
    """

    rule: str
    policy: DTypePolicy
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """What happens at one site.

    Args:
        site: the site.
        asked: the policy asked, as the author wrote it (`int8_from_keep`); `None` where nothing was.
        given: the policy the site has after `apply`, its source resolved (`int8_from_bfloat16`). Where the site stays
            as it is, the policy it carries now, or `keep`.
        status: see `Status`.
        rule: the key that won; `None` where no rule matched and the default, or nothing, applies.
        losers: the rules that matched and lost.
        reason: why given differs from asked, and what to know before; may be empty.
        bytes_before: bytes of the parameters now.
        bytes_after: bytes of the stored form after.
        bytes_kernel: bytes of derived kernel layouts, in memory only.
        kernel: what will run.
        replaces: what runs now, where that changes.
        casts_inputs: the site is kept, and its floating inputs are cast to its present dtype because the policies of
            other sites change the dtype of what flows in.
    """

    site: Site
    asked: DTypePolicy | None
    given: DTypePolicy
    status: Status
    rule: str | None = None
    losers: tuple[Loser, ...] = ()
    reason: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_kernel: int = 0
    kernel: str = ""
    replaces: str = ""
    casts_inputs: bool = False

    @property
    def path(self) -> str:
        """The site's first path."""
        return self.site.path

    def to_json(self) -> dict[str, Any]:
        """Returns the row as plain JSON values; of the site, the path."""
        return {
            "path": self.path,
            "asked": None if self.asked is None else serialize(self.asked),
            "given": serialize(self.given),
            "status": self.status.value,
            "rule": self.rule,
            "losers": [
                {"rule": loser.rule, "policy": serialize(loser.policy), "reason": loser.reason} for loser in self.losers
            ],
            "reason": self.reason,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_kernel": self.bytes_kernel,
            "kernel": self.kernel,
            "replaces": self.replaces,
            "casts_inputs": self.casts_inputs,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], site: Site) -> Row:
        """Makes the row of `site` that `to_json` returned.

        Raises:
            ValueError: a field has a value of another type.
        """
        fields = dict(data)
        for name, kind in _PLAIN_FIELDS.items():
            if type(fields[name]) is not kind:
                raise ValueError(f"field {name!r} of a row is {fields[name]!r}")
        if not all(isinstance(rule, str | None) for rule in (fields["rule"], *(x["rule"] for x in data["losers"]))):
            raise ValueError("a rule of a row is not text")
        fields.pop("path")
        fields["asked"] = None if data["asked"] is None else deserialize(data["asked"])
        fields["given"] = deserialize(data["given"])
        fields["status"] = Status(data["status"])
        fields["losers"] = tuple(Loser(x["rule"], deserialize(x["policy"]), x["reason"]) for x in data["losers"])
        return cls(site=site, **fields)


_PLAIN_FIELDS = {
    "reason": str,
    "bytes_before": int,
    "bytes_after": int,
    "bytes_kernel": int,
    "kernel": str,
    "replaces": str,
    "casts_inputs": bool,
}
"""The fields of a row that are written as they are."""


@dataclass(frozen=True, repr=False)
class Plan:
    """A policy map bound to a tree. Plans are equal if they were made of equal trees and maps and say the same.

    `print(plan)` shows a table, notebooks an HTML one. A plan has a hash and can be pickled.

    Args:
        tree: the tree.
        author_map: the author's map; every reader gets a copy by `policy`, so that nobody changes it.
        rows: one for each site, in the tree's order.
        warnings: findings that `strict=False` let through, and rules that match but never win.
    """

    tree: Tree
    author_map: DTypePolicyMap = field(hash=False)
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "author_map", copy.copy(self.author_map))

    @property
    def policy(self) -> DTypePolicyMap:
        """The author's map, as it was given: a copy of its own."""
        return copy.copy(self.author_map)

    @cached_property
    def totals(self) -> Totals:
        """How much of the model is in which form before and after, and what was left and why."""
        return total(self.rows)

    @cached_property
    def _by_path(self) -> Mapping[str, Row]:
        return {path: row for row in self.rows for path in row.site.paths}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __contains__(self, path: object) -> bool:
        return path in self._by_path

    def __getitem__(self, path: str) -> Row:
        """Returns the row of the site at `path`, which may be any of its paths.

        Raises:
            PathError: no site has this path; the nearest one is suggested.
        """
        return self._by_path[self.tree[path].path]

    def __repr__(self) -> str:
        return f"<Plan of {self.tree.name}: {len(self)} sites>"

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.tree, self.author_map, self.rows, self.warnings)

    def __str__(self) -> str:
        return self.table().to_text()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def table(self, *, every: bool = False) -> Table:
        """Returns the plan as a table, its totals and warnings below.

        Args:
            every: whether every site has a row. Otherwise sites without parameters are left out, and sites that differ
                only in the numbers of their paths are one row (`layer/{0..5}/query`).
        """
        from narrowcast.plan.overview import overview

        return overview(self, every=every)

    def explain(self, path: str) -> Explanation:
        """Says which rule won at `path`, which lost and why, what was asked and what is given, as text and as data.

        Raises:
            PathError: no site has this path; the nearest one is suggested.
        """
        from narrowcast.plan.explain import Explanation

        return Explanation(path, self[path])

    def diff(self, other: Plan) -> Difference:
        """Says what is otherwise in `other`: by path and in total, as a table and as data.

        Raises:
            PolicyTypeError: `other` is no plan.
        """
        if not isinstance(other, Plan):
            raise PolicyTypeError(
                "Only plans can be compared",
                got={"other": other},
                expected="a plan of the same model",
                fix="Make it first: narrowcast.plan(model, policy)",
            )
        from narrowcast.plan.diff import compare

        return compare(self, other)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain JSON values, from which `from_json` makes an equal one."""
        return {
            "tree": self.tree.to_json(),
            "map": serialize(self.author_map),
            "rows": [row.to_json() for row in self.rows],
            "warnings": list(self.warnings),
            "totals": self.totals.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Makes the plan that `to_json` returned.

        Raises:
            ValueError: the rows are not those of the tree.
        """
        tree = Tree.from_json(data["tree"])
        paths = [row["path"] for row in data["rows"]]
        if paths != [site.path for site in tree]:
            raise ValueError("the rows of the plan are not those of its tree")
        rows = tuple(Row.from_json(row, site) for row, site in zip(data["rows"], tree, strict=True))
        author_map = deserialize(data["map"])
        if not isinstance(author_map, DTypePolicyMap):
            raise ValueError("the map of the plan is not a map")
        return cls(tree, author_map, rows, tuple(data["warnings"]))
