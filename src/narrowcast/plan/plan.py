"""The plan: a map bound to a tree, one frozen row a site.

Everything that follows (applying, saving, exporting, explaining) reads the plan and never asks the map again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap
from narrowcast.plan.carrier import Status
from narrowcast.plan.tree import Site, Tree

__all__ = ["Loser", "Plan", "Row"]


@dataclass(frozen=True, slots=True)
class Loser:
    """A rule that matched a site and did not win.

    Args:
        rule: its key.
        policy: the policy it would have given.
        reason: why it lost (`an exact key wins over patterns`, `keep wins over patterns`).
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
        given: the policy the site has after `apply`, its source resolved (`int8_from_bfloat16`); `keep` where it stays.
        status: see `Status`.
        rule: the key that won; `None` where no rule matched and the default, or nothing, applies.
        losers: the rules that matched and lost.
        reason: why given differs from asked, and what to know before; may be empty.
        bytes_before: bytes of the parameters now.
        bytes_after: bytes of the stored form after.
        bytes_kernel: bytes of derived kernel layouts, in memory only.
        kernel: what will run.
        replaces: what runs now.
        casts_inputs: the site is kept, and its floating inputs are cast to its present dtype because the policies of other
            sites change the dtype of what flows in.
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


@dataclass(frozen=True)
class Plan:
    """A policy map bound to a tree.

    Args:
        tree: the tree.
        policy: the author's map, as it was given (a frozen copy).
        rows: one for each site, in the tree's order.
        warnings: findings that `strict=False` let through, and rules that match but never win.
    """

    tree: Tree
    policy: DTypePolicyMap
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    @cached_property
    def _by_path(self) -> Mapping[str, Row]:
        return {path: row for row in self.rows for path in row.site.paths}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, path: str) -> Row:
        """Returns the row of the site at `path`; raises `PathError` if there is none."""
        return self._by_path[self.tree[path].path]

    def __str__(self) -> str:
        raise NotImplementedError  # helper B: table through report

    def to_json(self) -> Any:
        raise NotImplementedError  # helper B
