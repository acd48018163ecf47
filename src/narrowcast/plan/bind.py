"""Binding: a map and a tree become a plan."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from narrowcast.dtype_policies import DTypePolicyMap, asked
from narrowcast.errors import PlanError, PolicyError
from narrowcast.plan.carrier import Carrier
from narrowcast.plan.findings import Findings
from narrowcast.plan.outcome import Outcome, Outcomes
from narrowcast.plan.plan import Plan, Row
from narrowcast.plan.resolve import Choice, Resolver
from narrowcast.plan.tree import Site, Tree

__all__ = ["as_map", "bind"]

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
    if isinstance(policy, PathLike) or (isinstance(policy, str) and policy.endswith((".toml", ".json"))):
        raise PolicyError(
            "Policy is the name of a file",
            got={"policy": str(policy)},
            expected="a map, a policy, or a policy's name",
            fix="Read the file first: `narrowcast.read_policy(path)`",
        )
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
    findings, bound = _look_up(tree, policies, carrier)
    errors, refused = list(findings.errors(tree)), list(findings.fallbacks()) if fallback == "error" else []
    if refused or (strict and errors):
        raise PlanError(
            f"Policy map does not fit {tree.name}",
            findings=[*errors, *refused],
            fix="Correct the map" + ("" if refused else ", or plan with strict=False to keep these as warnings"),
        )
    changes = any(outcome.changes_activations for _, _, outcome in bound)
    rows = tuple(_row(site, choice, outcome, changes=changes) for site, choice, outcome in bound)
    return Plan(tree, policies, rows, (*errors, *findings.warnings()))


def idle_rules(tree: Tree, policies: DTypePolicyMap, carrier: Carrier) -> list[str]:
    """Returns what `bind` finds of rules that match nothing or can do nothing, whatever else does not hold."""
    return list(_look_up(tree, policies, carrier)[0].idle(tree))


def _look_up(
    tree: Tree, policies: DTypePolicyMap, carrier: Carrier
) -> tuple[Findings, list[tuple[Site, Choice, Outcome]]]:
    """What the map says of every site, and what comes of it."""
    resolver, outcomes = Resolver(policies), Outcomes(carrier, tree)
    findings = Findings(resolver, policies)
    bound: list[tuple[Site, Choice, Outcome]] = []
    for site in tree:
        choice = resolver.choose(site)
        outcome = outcomes.at(site, choice)
        findings.add(site, choice, outcome)
        bound.append((site, choice, outcome))
    return findings, bound


def _row(site: Site, choice: Choice, outcome: Outcome, *, changes: bool) -> Row:
    """The row of a site in a plan that `changes` the dtype of what flows between layers, or does not."""
    return Row(
        site=site,
        asked=choice.asked,
        given=outcome.given,
        status=outcome.status,
        rule=choice.rule,
        losers=choice.losers,
        reason=outcome.reason,
        bytes_before=outcome.bytes_before,
        bytes_after=outcome.bytes_after,
        bytes_kernel=outcome.bytes_kernel,
        kernel=outcome.kernel,
        replaces=outcome.replaces,
        casts_inputs=outcome.casts_inputs or (changes and outcome.may_cast_inputs),
    )
