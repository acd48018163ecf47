"""What comes of one policy at one sort of site, found once: big models have many sites and few sorts of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from narrowcast.dtype_policies import DTypePolicy, keep, registry
from narrowcast.errors import NarrowcastError, UnsupportedError
from narrowcast.plan.carrier import Carrier, Status, Verdict
from narrowcast.plan.resolve import Choice, quoted
from narrowcast.plan.tree import Site, Tree

__all__ = ["Outcome", "Outcomes", "stands_in_the_way"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row says beside the rule. See `Row` for the fields that both have.

    Args:
        conflict: why the policy that the site carries now stands in the way; `''` if it does not.
        changes_activations: whether what flows out of the site is of another dtype than now.
        may_cast_inputs: whether the site is kept and computes in floats, so that its inputs are cast where others
            change what flows in.
    """

    given: DTypePolicy
    status: Status
    reason: str
    bytes_before: int
    bytes_after: int
    bytes_kernel: int
    kernel: str
    replaces: str = ""
    casts_inputs: bool = False
    conflict: str = ""
    changes_activations: bool = False
    may_cast_inputs: bool = False


class Outcomes:
    """Finds outcomes, and asks the carrier once for each sort of site.

    Args:
        carrier: the framework's knowledge.
        tree: the tree whose sites are asked for.
    """

    def __init__(self, carrier: Carrier, tree: Tree) -> None:
        self._carrier = carrier
        self._tree = tree
        self._found: dict[tuple[Any, ...], Outcome] = {}
        self._numbers: dict[Any, int] = {}
        self._numbers_by_id: dict[int, int] = {}

    def at(self, site: Site, choice: Choice) -> Outcome:
        """Returns what comes of `choice` at `site`.

        Raises:
            UnsupportedError: the framework does not carry the mode out yet; names the rule and the path.
        """
        if len(site.members) > 1 or site.tied:
            return self._find(site, choice)
        member = site.members[0]
        key = (
            member.kind,
            member.class_name,
            self._number(member.parameters),
            self._number(member.details),
            site.device,
            # Policies of a tree and of a map live as long as the binding; their identity is quicker than their hash.
            id(member.policy),
            id(choice.asked),
        )
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._find(site, choice)
        return found

    def _number(self, value: tuple[Any, ...]) -> int:
        """A number that equal values share; what is the same object is not hashed again."""
        number = self._numbers_by_id.get(id(value))
        if number is None:
            number = self._numbers_by_id[id(value)] = self._numbers.setdefault(value, len(self._numbers))
        return number

    def _find(self, site: Site, choice: Choice) -> Outcome:
        present = None if site.policy is None or site.policy is keep else site.policy
        base = self._as_it_is(site, choice, present)
        if choice.asked is None or choice.asked is keep:
            return base
        policy, reason = _resolve(choice.asked, site, present)
        if policy is None:
            return replace(base, status=Status.NOT_A_TARGET, reason=reason)
        if policy == present:
            return replace(base, status=Status.APPLIED, reason="carries it already")
        if present is not None and stands_in_the_way(present, policy):
            return replace(
                base,
                status=Status.NOT_A_TARGET,
                reason=f"carries {present.name}; dequantize it first",
                conflict=f"asks for {choice.asked.name} where {present.name} is carried out already",
            )
        verdict = self._judge(site, policy, choice)
        if verdict.status is Status.APPLIED:
            return self._applied(base, site, present, policy, verdict)
        if verdict.status is Status.FELL_BACK:
            return self._fallen_back(base, site, present, choice, verdict)
        return replace(base, status=Status.NOT_A_TARGET, reason=verdict.reason)

    def _as_it_is(self, site: Site, choice: Choice, present: DTypePolicy | None) -> Outcome:
        """The outcome of a site that stays as it is."""
        num_bytes, bytes_kernel, kernel = site.num_bytes, 0, ""
        if present is not None and present.source is not None:
            now = self._judge(site, present, choice)
            num_bytes, bytes_kernel, kernel = now.bytes_after, now.bytes_kernel, now.kernel
        elif site.parameters:
            kernel = self._carrier.kernel(site)
        return Outcome(
            given=keep if present is None else present,
            status=Status.KEPT,
            reason="",
            bytes_before=num_bytes,
            bytes_after=num_bytes,
            bytes_kernel=bytes_kernel,
            kernel=kernel,
            casts_inputs=site.policy is keep,
            may_cast_inputs=present is None and site.kind != "container" and site.dtype is not None,
        )

    def _applied(
        self, base: Outcome, site: Site, present: DTypePolicy | None, policy: DTypePolicy, verdict: Verdict
    ) -> Outcome:
        """The outcome of a site that gets `policy`."""
        now = (site.dtype or self._tree.dtype) if present is None else present.compute_dtype
        return replace(
            base,
            given=policy,
            status=Status.APPLIED,
            reason=verdict.reason,
            bytes_after=verdict.bytes_after,
            bytes_kernel=verdict.bytes_kernel,
            kernel=verdict.kernel,
            replaces=verdict.replaces or base.kernel,
            casts_inputs=False,
            may_cast_inputs=False,
            changes_activations=now is not None and policy.compute_dtype not in (None, now),
        )

    def _fallen_back(
        self, base: Outcome, site: Site, present: DTypePolicy | None, choice: Choice, verdict: Verdict
    ) -> Outcome:
        """The outcome where the mode does not fit the shape or place: the source policy, if that was named."""
        source = choice.asked.source if choice.asked is not None else None
        if source is not None and source is not keep and source != base.given:
            second = self._judge(site, source, choice)
            if second.status is Status.APPLIED:
                found = self._applied(base, site, present, source, second)
                reason = "; ".join(filter(None, (verdict.reason, second.reason)))
                return replace(found, status=Status.FELL_BACK, reason=reason)
        return replace(base, status=Status.FELL_BACK, reason=verdict.reason)

    def _judge(self, site: Site, policy: DTypePolicy, choice: Choice) -> Verdict:
        try:
            return self._carrier.judge(site, policy)
        except UnsupportedError as error:
            rule = "the policy for every layer" if choice.rule is None else f"rule {quoted(choice.rule)}"
            raise UnsupportedError(
                f"{error.problem} (asked by {rule} at {site.path or 'the root'!r})",
                got=error.got,
                expected=error.expected,
                suggestion=error.suggestion,
                fix=error.fix,
            ) from None


def stands_in_the_way(present: DTypePolicy, policy: DTypePolicy) -> bool:
    """Whether `policy` can only come once `present` is taken away.

    A mode that trains leaves the parameters as they were, so another mode of its family takes over from it: a recipe is
    changed in mid-training, or what was trained is stored for inference.
    """
    if present.source is None:
        return False
    return not (registry.mode_of(present).is_trainable and type(policy) is type(present))


def _resolve(policy: DTypePolicy, site: Site, present: DTypePolicy | None) -> tuple[DTypePolicy | None, str]:
    """The policy with its source named, or `None` and why there is no source to name."""
    if policy.source is not keep:
        return policy, ""
    source: DTypePolicy | None = present
    if present is not None and present.source is not None:
        source = present.source
    if source is None:
        if site.dtype is None:
            holder = "a container" if site.kind == "container" else "it"
            return None, f"{holder} has no floating parameters of its own"
        source = DTypePolicy(site.dtype)
    try:
        return policy.with_source(source), ""  # type: ignore[attr-defined]
    except NarrowcastError as error:
        return None, error.problem
