"""What is wrong with a map on a model: collected while binding, told together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, keep, registry
from narrowcast.plan.carrier import Status
from narrowcast.plan.nearest import meant
from narrowcast.plan.outcome import Outcome
from narrowcast.plan.resolve import SAME, Choice, Resolver, quoted
from narrowcast.plan.tree import Site, Tree

__all__ = ["Findings"]

_MAX_SUGGESTIONS = 10  # rules for which near paths are looked up; each look takes milliseconds
_MAX_REASONS = 3
_DOTS = re.compile(r"(?<=\w)\.(?=\w)")


@dataclass(slots=True)
class _Group:
    """Layers with one finding in common."""

    first: str
    is_container: bool = False
    num_sites: int = 0
    details: dict[str, int] = field(default_factory=dict)

    def add(self, detail: str = "", num_bytes: int = 0) -> None:
        self.num_sites += 1
        if detail:
            self.details[detail] = self.details.get(detail, 0) + num_bytes

    def where(self) -> str:
        return _layers(self.num_sites, self.first)

    def why(self) -> str:
        """The reasons: those of the largest layers first, those of layers without parameters if there are no others."""
        told = [reason for reason, num_bytes in self.details.items() if num_bytes] or list(self.details)
        told.sort(key=lambda reason: -self.details[reason])
        shown = told[:_MAX_REASONS]
        more = len(told) - len(shown)
        return "; ".join(shown) + (f"; and {more} more reasons" if more else "")


class Findings:
    """Collects, site by site, what does not hold.

    Args:
        resolver: the map's look-up.
        policies: the map.
    """

    def __init__(self, resolver: Resolver, policies: DTypePolicyMap) -> None:
        self._resolver = resolver
        default = resolver.default
        self._float_default = (
            default if default is not None and default.source is None and default is not keep else None
        )
        self._optional = policies.optional
        self._overlaps: dict[tuple[tuple[str, ...], bool], tuple[_Group, tuple[str, ...]]] = {}
        self._conflicts: dict[str, _Group] = {}
        self._fallbacks: dict[tuple[str, str], _Group] = {}
        self._given: dict[str | None, int] = {}
        self._refused: dict[str | None, _Group] = {}
        self._matched: dict[str, int] = {}
        self._beaten: dict[str, dict[str, None]] = {}
        self._beside_default: dict[tuple[str, str], _Group] = {}

    def add(self, site: Site, choice: Choice, outcome: Outcome) -> None:
        """Adds one site, what the map says of it, and what comes of that."""
        if choice.rule is not None:
            self._matched[choice.rule] = self._matched.get(choice.rule, 0) + 1
        for loser in choice.losers:
            self._matched[loser.rule] = self._matched.get(loser.rule, 0) + 1
            if loser.reason == SAME:
                self._count(loser.rule, site, outcome)
            elif choice.rule is not None:
                self._beaten.setdefault(loser.rule, {})[choice.rule] = None
        if choice.overlap:
            key = choice.overlap, len(choice.where) > 1
            group, _ = self._overlaps.setdefault(key, (_Group(choice.where[0]), choice.where))
            group.add()
        if choice.asked is None:
            return
        if outcome.conflict:
            self._conflicts.setdefault(f"{_by(choice.rule)} {outcome.conflict}", _Group(site.path)).add()
        self._count(choice.rule, site, outcome)
        source = outcome.given.source
        if choice.rule is not None and choice.asked.source is keep and source not in (None, keep, self._float_default):
            self._beside_default.setdefault((choice.rule, str(source and source.name)), _Group(site.path)).add()
        if outcome.status is Status.FELL_BACK:
            self._fallbacks.setdefault((_by(choice.rule), outcome.reason), _Group(site.path)).add()

    def _count(self, rule: str | None, site: Site, outcome: Outcome) -> None:
        # A conflict is told by itself, so that the rule is not told to be powerless too.
        if outcome.status in (Status.APPLIED, Status.KEPT) or outcome.conflict:
            self._given[rule] = self._given.get(rule, 0) + 1
        else:
            reason = outcome.reason or f"{site.kind} layers cannot"
            self._refused.setdefault(rule, _Group(site.path, site.kind == "container")).add(reason, site.num_bytes)

    def errors(self, tree: Tree) -> Iterator[str]:
        """Yields every finding, each once, in a stable order."""
        for (rules, is_shared), (group, where) in self._overlaps.items():
            yield self._overlap(rules, group, where, is_shared=is_shared)
        yield from self.idle(tree)
        for text, group in self._conflicts.items():
            yield f"{text} ({group.where()}); dequantize the model first"

    def idle(self, tree: Tree) -> Iterator[str]:
        """Yields the rules that match nothing, and those that can do nothing."""
        yield from self._unmatched(tree)
        yield from self._powerless()

    def fallbacks(self) -> Iterator[str]:
        """Yields the sites that fall back, grouped by rule and reason."""
        for (rule, reason), group in self._fallbacks.items():
            yield f"{rule} cannot be carried out at {group.where()}: {reason}"

    def warnings(self) -> Iterator[str]:
        """Yields what is no error: rules that never win, modes that start from another dtype than the default."""
        yield from self._dotted()
        default = self._float_default
        for (rule, source), group in self._beside_default.items() if default is not None else ():
            policy = self._resolver.rules[rule]
            mode, full = registry.mode_of(policy).name, policy.with_source(default).name  # type: ignore[attr-defined]
            yield (
                f"{_by(rule)} asks for {mode} and names no source policy: {group.where()}, will start from the present "
                f"dtype, {source}, and not from the default; for that write {quoted(full)}"
            )
        for rule in self._resolver.rules:
            if rule in self._matched and rule not in self._given and rule not in self._refused:
                matched = _count(self._matched[rule])
                yield f"Rule {quoted(rule)} matches {matched} and wins at none: it loses to {self._winners(rule)}"

    def _winners(self, rule: str) -> str:
        return ", ".join(quoted(key) for key in list(self._beaten.get(rule, {}))[:_MAX_REASONS])

    def _dotted(self) -> Iterator[str]:
        for rule in self._resolver.rules:
            slashed = _DOTS.sub("/", rule)
            if slashed != rule and slashed.endswith(".*"):
                slashed = f"{slashed[:-2]}/.*"
            if slashed != rule and "/" not in rule and rule in self._matched:
                yield (
                    f"Rule {quoted(rule)} has dots, each of which stands for any character; paths are joined by "
                    f"slashes, so {quoted(slashed)} may be meant"
                )

    def _overlap(self, rules: tuple[str, ...], group: _Group, where: tuple[str, ...], *, is_shared: bool) -> str:
        named = " and ".join(f"{quoted(key)} ({self._resolver.rules[key].name})" for key in rules)
        if is_shared:
            return (
                f"Paths {where[0]!r} and {where[1]!r} lead to one layer, shared or tied, and rules {named} differ; "
                "give both the same policy"
            )
        return (
            f"Rules {named} overlap at {group.where()}; "
            "add a rule for the exact path, or make the patterns exclude each other"
        )

    def _unmatched(self, tree: Tree) -> Iterator[str]:
        rules = [key for key in self._resolver.rules if key not in self._matched and key not in self._optional]
        for number, key in enumerate(rules):
            near = meant(key, tree.paths) if number < _MAX_SUGGESTIONS else []
            hint = f"; did you mean {_either(near)}?" if near else ""
            yield f"Rule {quoted(key)} matches no layer{hint}"

    def _powerless(self) -> Iterator[str]:
        asked: dict[str | None, DTypePolicy] = dict(self._resolver.rules.items())
        if not asked and self._resolver.default is not None:
            asked[None] = self._resolver.default  # beside rules, a default is for whatever can take it
        for rule, policy in asked.items():
            group = self._refused.get(rule)
            if group is None or rule in self._given:
                continue
            mode = registry.mode_of(policy).name if policy.source is not None else policy.name
            below = ""
            if rule in self._beaten:
                below = f"; elsewhere it loses to {self._winners(rule)}"
            elif rule and group.is_container:
                below = f"; for the layers below it, write {quoted(rule + '/.*')}"
            yield f"{_by(rule)} asks for {mode}, and {_none_of(group.num_sites)} have it: {group.why()}{below}"


def _by(rule: str | None) -> str:
    return "The policy for every layer" if rule is None else f"Rule {quoted(rule)}"


def _count(num_sites: int) -> str:
    return f"{num_sites:,} layer{'' if num_sites == 1 else 's'}"


def _layers(num_sites: int, first: str) -> str:
    shown = repr(first) if first else "the root"
    return shown if num_sites == 1 else f"{_count(num_sites)}, the first {shown}"


def _none_of(num_sites: int) -> str:
    return "the one layer it reaches cannot" if num_sites == 1 else f"none of the {num_sites:,} layers it reaches can"


def _either(names: Iterable[str]) -> str:
    *others, last = (quoted(name) for name in names)
    return f"{', '.join(others)} or {last}" if others else last
