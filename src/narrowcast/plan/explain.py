"""Why a site has the policy it has: every rule that matched, what was asked, what is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.carrier import Status
from narrowcast.plan.plan import Row
from narrowcast.plan.resolve import quoted
from narrowcast.plan.table import ROOT, format_bytes, format_shape

__all__ = ["Explanation"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One site of a plan, told in full; `str` gives the text, `to_json` the data.

    Args:
        path: the path that was asked for, one of the site's.
        row: the site's row.
    """

    path: str
    row: Row

    def __str__(self) -> str:
        row, site = self.row, self.row.site
        lines = [f"{self.path or ROOT}: {' and '.join(site.kinds)}, {site.class_name}"]
        facts = [
            ("also at", ", ".join(path or ROOT for path in site.paths if path != self.path)),
            ("tied", "; ".join(" = ".join(names) for names in site.tied)),
            ("holds", ", ".join(f"{p.name} {format_shape(p.shape)} {p.dtype}" for p in site.parameters)),
            ("carries", "" if site.policy is None else site.policy.name),
            ("asked", self._asked()),
            *(("lost", f"rule {quoted(loser.rule)} ({loser.policy.name}): {loser.reason}") for loser in row.losers),
            ("status", row.status.value),
            ("given", row.given.name + _dtypes(row.given)),
            ("inputs", "cast to its own dtype, since other layers' policies change what flows in" * row.casts_inputs),
            ("reason", row.reason),
            ("kernel", row.kernel),
            ("replaces", row.replaces),
            ("bytes", self._bytes() if site.parameters else ""),
        ]
        lines += [f"  {name:<9} {text}" for name, text in facts if text]
        return "\n".join(lines)

    def _asked(self) -> str:
        row = self.row
        if row.asked is None:
            return "nothing: no rule matches, and the map has no default"
        by = "the default: no rule matches" if row.rule is None else f"rule {quoted(row.rule)}"
        return f"{row.asked.name}, by {by}"

    def _bytes(self) -> str:
        row = self.row
        text = f"{format_bytes(row.bytes_before)} now"
        if row.status is not Status.KEPT:
            text += f", {format_bytes(row.bytes_after)} after"
        return text + (f", and {format_bytes(row.bytes_kernel)} of kernel layout" if row.bytes_kernel else "")

    def to_json(self) -> dict[str, Any]:
        """Returns the explanation as plain JSON values: the row, and what the site is."""
        site = self.row.site
        return {
            **self.row.to_json(),
            "path": self.path,
            "paths": list(site.paths),
            "kinds": list(site.kinds),
            "class": site.class_name,
            "tied": [list(names) for names in site.tied],
            "parameters": [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype} for p in site.parameters],
            "compute_dtype": self.row.given.compute_dtype,
            "variable_dtype": self.row.given.variable_dtype,
        }


def _dtypes(policy: DTypePolicy) -> str:
    if policy.compute_dtype is None:
        return ""
    return f" (computes in {policy.compute_dtype}, variables in {policy.variable_dtype})"
