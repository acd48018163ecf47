"""How much of a model is in which form before and after, in bytes, and what was left and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowcast.dtype_policies import DTypePolicy, keep
from narrowcast.plan.carrier import Status
from narrowcast.plan.table import format_bytes
from narrowcast.plan.tree import Site

if TYPE_CHECKING:
    from narrowcast.plan.plan import Row

__all__ = ["Left", "Share", "Totals", "total"]


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a model is in one form.

    Args:
        form: a policy's name, or a dtype where a site has no policy.
        num_sites: the sites that hold something in this form.
        num_bytes: the bytes of it.
    """

    form: str
    num_sites: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Left:
    """What a plan leaves as it is, or gives something other than was asked, for one reason.

    Args:
        reason: why.
        status: see `Status`.
        num_sites: the sites with parameters concerned.
        num_bytes: the bytes of their parameters now.
    """

    reason: str
    status: Status
    num_sites: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """A plan summed up.

    Args:
        bytes_before: bytes of all parameters now.
        bytes_after: bytes of all stored forms after.
        bytes_kernel: bytes of derived kernel layouts, in memory only.
        before: shares now, largest first.
        after: shares after, largest first.
        left: what stays, largest first.
    """

    bytes_before: int
    bytes_after: int
    bytes_kernel: int
    before: tuple[Share, ...]
    after: tuple[Share, ...]
    left: tuple[Left, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the totals as plain JSON values."""
        return {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_kernel": self.bytes_kernel,
            "before": [_share_to_json(share) for share in self.before],
            "after": [_share_to_json(share) for share in self.after],
            "left": [
                {
                    "reason": left.reason,
                    "status": left.status.value,
                    "sites": left.num_sites,
                    "bytes": left.num_bytes,
                }
                for left in self.left
            ],
        }

    def lines(self) -> tuple[str, ...]:
        """Returns the totals as lines of text."""
        first = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        if self.bytes_before:
            first += f" ({self.bytes_after / self.bytes_before:.0%})"
        if self.bytes_kernel:
            first += f", and {format_bytes(self.bytes_kernel)} of kernel layouts in memory"
        lines = [first, f"now    {_shares(self.before)}", f"after  {_shares(self.after)}"]
        lines += [
            f"left   {format_bytes(left.num_bytes)} in {_count(left.num_sites)}: {left.reason}" for left in self.left
        ]
        return tuple(lines)


def total(rows: Iterable[Row]) -> Totals:
    """Sums up the rows of a plan."""
    rows = tuple(rows)
    before: dict[str, list[int]] = {}
    after: dict[str, list[int]] = {}
    left: dict[tuple[Status, str], list[int]] = {}
    for row in rows:
        if not row.site.parameters:
            continue
        _add_forms(before, row.site, row.site.policy, row.bytes_before)
        _add_forms(after, row.site, row.given, row.bytes_after)
        if row.status is not Status.APPLIED:
            _add(left, (row.status, row.reason or _unasked(row)), row.bytes_before)
    return Totals(
        sum(row.bytes_before for row in rows),
        sum(row.bytes_after for row in rows),
        sum(row.bytes_kernel for row in rows),
        _shares_of(before),
        _shares_of(after),
        tuple(
            Left(reason, status, sites, size)
            for (status, reason), (sites, size) in sorted(left.items(), key=lambda item: -item[1][1])
        ),
    )


def _unasked(row: Row) -> str:
    return "no rule names it" if row.asked is None else "keep"


def _add_forms(shares: dict[str, list[int]], site: Site, policy: DTypePolicy | None, num_bytes: int) -> None:
    if policy is not None and policy != keep:
        _add(shares, policy.name, num_bytes)
        return
    sizes: dict[str, int] = {}
    for parameter in site.parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.num_bytes
    for dtype, size in sizes.items():
        _add(shares, dtype, size)


def _add(sums: dict[Any, list[int]], key: Any, num_bytes: int) -> None:
    entry = sums.setdefault(key, [0, 0])
    entry[0] += 1
    entry[1] += num_bytes


def _shares_of(sums: dict[str, list[int]]) -> tuple[Share, ...]:
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple(Share(form, sites, size) for form, (sites, size) in ordered)


def _share_to_json(share: Share) -> dict[str, Any]:
    return {"form": share.form, "sites": share.num_sites, "bytes": share.num_bytes}


def _shares(shares: tuple[Share, ...]) -> str:
    return ", ".join(f"{s.form} {format_bytes(s.num_bytes)} in {_count(s.num_sites)}" for s in shares) or "nothing"


def _count(num_sites: int) -> str:
    return f"{num_sites:,} layer{'' if num_sites == 1 else 's'}"
