"""Binding: a map and a tree become a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, asked, keep, registry
from narrowcast.errors import NarrowcastError, PlanError, PolicyError, UnsupportedError
from narrowcast.plan.carrier import Carrier, Status, Verdict
from narrowcast.plan.findings import Findings, quoted
from narrowcast.plan.plan import Plan, Row
from narrowcast.plan.resolve import Choice, Resolver
from narrowcast.plan.tree import Site, Tree

__all__ = ["as_map", "bind"]

Fallback = Literal["source", "error"]
_FALLBACKS = ("source", "error")


def as_map(policy: Any) -> DTypePolicyMap:
    """Returns what was asked of a model as a map of its own: one policy becomes the default of a map without rules.

    Args:
        policy: a map; a dict from keys to policies; a policy, its name, its config, or the name of a mode.

    Raises:
        PolicyError: it is none of these.

    Example:
        >>> as_map("int8")
        <DTypePolicyMap default_policy=<QuantizedDTypePolicy "int8_from_keep">, policy_map={}>
    """
    if isinstance(policy, Mapping) and not isinstance(policy, DTypePolicyMap) and "class_name" not in policy:
        policy = DTypePolicyMap(None, dict(policy))
    if policy is None:
        raise PolicyError("Policy is not given", got={"policy": None}, expected="a map, a policy, or a policy's name")
    policy = asked(policy)
    if isinstance(policy, DTypePolicyMap):
        return policy.__copy__()
    return DTypePolicyMap(policy)


def bind(tree: Tree, policy: Any, carrier: Carrier, *, strict: bool = True, fallback: str = "source") -> Plan:
    """Says what a map does at every site of a tree, from the tree alone.

    Args:
        tree: the model's tree.
        policy: whatever `as_map` takes. One policy goes to every site that can carry it; a map with a default gives
            that to what no rule matches; a map without leaves it as it is.
        carrier: the framework's knowledge of what can be carried out where.
        strict: whether findings are errors. Otherwise they are warnings in the plan, and where rules contradict each
            other the first counts (`keep` before others).
        fallback: `"source"` gives the source policy where a mode exists for a kind and not for this shape or place;
            `"error"` refuses the plan, strict or not.

    Returns:
        The plan; equal trees, maps and carriers give equal plans.

    Raises:
        PlanError: rules that contradict each other, match nothing or can do nothing, a policy over a quantized one, or
            fallbacks where these are refused. Every finding is told.
        UnsupportedError: a mode is not carried out in this framework yet.
    """
    if fallback not in _FALLBACKS:
        raise PolicyError("Fallback is unknown", got={"fallback": fallback}, expected="'source' or 'error'")
    policies = as_map(policy)
    resolver = Resolver(policies)
    findings = Findings(resolver, policies)
    judge = _Judge(carrier)
    rows = []
    for site in tree:
        choice = resolver.choose(site)
        row, conflict = _bind_site(site, choice, judge)
        findings.add(choice, row, conflict=conflict)
        rows.append(row)
    errors, refused = list(findings.errors(tree)), list(findings.fallbacks()) if fallback == "error" else []
    if refused or (strict and errors):
        raise PlanError(
            f"Policy map does not fit {tree.name}",
            findings=[*errors, *refused],
            fix="Correct the map" + ("" if refused else ", or plan with strict=False to keep these as warnings"),
        )
    return Plan(tree, policies, tuple(_cast_inputs(rows, tree)), (*errors, *findings.warnings()))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a verdict depends on, for a site of one module: sites that agree in it get one verdict."""

    kind: str
    class_name: str
    parameters: tuple[Any, ...]
    details: tuple[tuple[str, Any], ...]
    present: DTypePolicy | None
    device: str
    policy: DTypePolicy


class _Judge:
    """Asks the carrier once for each sort of site."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._verdicts: dict[_Kind, Verdict] = {}

    def __call__(self, site: Site, policy: DTypePolicy, choice: Choice) -> Verdict:
        if len(site.members) > 1 or site.tied:
            return self._ask(site, policy, choice)
        member = site.members[0]
        key = _Kind(
            member.kind, member.class_name, member.parameters, member.details, member.policy, site.device, policy
        )
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._ask(site, policy, choice)
        return verdict

    def _ask(self, site: Site, policy: DTypePolicy, choice: Choice) -> Verdict:
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

    def kernel(self, site: Site) -> str:
        return self._carrier.kernel(site)


def _present(site: Site) -> DTypePolicy | None:
    """The policy that decides what the site computes in now; `keep`, which only casts inputs, does not."""
    return None if site.policy is None or site.policy is keep else site.policy


def _bind_site(site: Site, choice: Choice, judge: _Judge) -> tuple[Row, str]:
    """The row of one site, and why the policy that it carries now stands in the way, if it does."""
    present = _present(site)
    base = _as_it_is(site, choice, present, judge)
    if choice.asked is None or choice.asked is keep:
        return base, ""
    policy, reason = _resolve(choice.asked, site, present)
    if policy is None:
        return replace(base, status=Status.NOT_A_TARGET, reason=reason), ""
    if policy == present:
        return replace(base, status=Status.APPLIED, reason="carries it already"), ""
    if present is not None and _stands_in_the_way(present, policy):
        conflict = f"asks for {choice.asked.name} where {present.name} is carried out already"
        return replace(
            base, status=Status.NOT_A_TARGET, reason=f"carries {present.name}; dequantize it first"
        ), conflict
    verdict = judge(site, policy, choice)
    if verdict.status is Status.APPLIED:
        return _given(base, policy, verdict, verdict.reason), ""
    if verdict.status is Status.FELL_BACK:
        return _fall_back(base, choice, verdict, judge), ""
    return replace(base, status=Status.NOT_A_TARGET, reason=verdict.reason), ""


def _stands_in_the_way(present: DTypePolicy, policy: DTypePolicy) -> bool:
    """Whether `policy` can only come once `present` is taken away.

    A mode that trains leaves the parameters as they were, so another mode of its family takes over from it: a recipe is
    changed in mid-training, or what was trained is stored for inference.
    """
    if present.source is None:
        return False
    return not (registry.mode_of(present).is_trainable and type(policy) is type(present))


def _as_it_is(site: Site, choice: Choice, present: DTypePolicy | None, judge: _Judge) -> Row:
    """The row of a site that stays as it is."""
    num_bytes, bytes_kernel, kernel = site.num_bytes, 0, ""
    if present is not None and present.source is not None:
        now = judge(site, present, choice)
        num_bytes, bytes_kernel, kernel = now.bytes_after, now.bytes_kernel, now.kernel
    elif site.parameters:
        kernel = judge.kernel(site)
    return Row(
        site=site,
        asked=choice.asked,
        given=keep if present is None else present,
        status=Status.KEPT,
        rule=choice.rule,
        losers=choice.losers,
        bytes_before=num_bytes,
        bytes_after=num_bytes,
        bytes_kernel=bytes_kernel,
        kernel=kernel,
        casts_inputs=site.policy is keep,
    )


def _given(base: Row, policy: DTypePolicy, verdict: Verdict, reason: str) -> Row:
    """The row of a site that gets `policy`."""
    return replace(
        base,
        given=policy,
        status=Status.APPLIED,
        reason=reason,
        bytes_after=verdict.bytes_after,
        bytes_kernel=verdict.bytes_kernel,
        kernel=verdict.kernel,
        replaces=verdict.replaces or base.kernel,
        casts_inputs=False,
    )


def _fall_back(base: Row, choice: Choice, verdict: Verdict, judge: _Judge) -> Row:
    """The row of a site whose mode does not fit its shape or place: it gets the source policy, if that was named."""
    source = choice.asked.source if choice.asked is not None else None
    if source is not None and source is not keep:
        if source == base.given:
            return replace(base, status=Status.FELL_BACK, reason=verdict.reason)
        second = judge(base.site, source, choice)
        if second.status is Status.APPLIED:
            reason = "; ".join(filter(None, (verdict.reason, second.reason)))
            return replace(_given(base, source, second, reason), status=Status.FELL_BACK)
    return replace(base, status=Status.FELL_BACK, reason=verdict.reason)


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


def _cast_inputs(rows: list[Row], tree: Tree) -> list[Row]:
    """Marks the kept sites whose inputs are cast, where the plan changes the dtype of what flows between layers."""
    if not any(_changes_activations(row, tree.dtype) for row in rows):
        return rows
    return [replace(row, casts_inputs=True) if _is_kept_computing(row) else row for row in rows]


def _changes_activations(row: Row, usual: str | None) -> bool:
    if row.given is keep:
        return False
    present = _present(row.site)
    before = (row.site.dtype or usual) if present is None else present.compute_dtype
    after = row.given.compute_dtype
    return before is not None and after is not None and before != after


def _is_kept_computing(row: Row) -> bool:
    return row.given is keep and row.site.kind != "container" and row.site.dtype is not None
