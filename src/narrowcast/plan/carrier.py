"""What a framework says of one site and one policy before anything is built.

`bind` decides *which* policy a site is asked to have; whether the framework can carry it out there, with which kernel
and at how many bytes is the framework's knowledge. It answers from the site alone, so that plans need no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Site

__all__ = ["Carrier", "Status", "Verdict"]


class Status(str, Enum):
    """What became of what was asked at a site."""

    APPLIED = "applied"
    """The policy asked is the policy given."""
    KEPT = "kept"
    """Nothing was asked, or `keep` was: the site stays as it is."""
    NOT_A_TARGET = "not a target"
    """A pattern reached a kind of site that has no such mode; it stays as it is."""
    FELL_BACK = "fell back"
    """The mode exists for the kind, but not for this shape or place; the source policy is given."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Verdict:
    """A framework's answer for one site and one policy.

    Args:
        status: `APPLIED`, `NOT_A_TARGET` or `FELL_BACK`.
        reason: why given differs from asked, or what to know before (slower than now, outputs opaque); may be empty.
        bytes_after: the bytes of the site's stored form.
        bytes_kernel: bytes of the layout a kernel derives from the stored form while it runs; never saved.
        kernel: what will run, in words (`onednn u8s8 gemm, per-token activations`).
        replaces: what runs at the site now.
    """

    status: Status
    reason: str = ""
    bytes_after: int = 0
    bytes_kernel: int = 0
    kernel: str = ""
    replaces: str = ""


class Carrier(Protocol):
    """What `bind` asks of a framework package."""

    def judge(self, site: Site, policy: DTypePolicy) -> Verdict:
        """Says whether `policy` (its source resolved, never `keep`) can be carried out at `site`."""
        ...

    def kernel(self, site: Site) -> str:
        """Says in words what runs at `site` as it is now; `''` where nothing of note does."""
        ...
