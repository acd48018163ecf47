"""Which rule of a map counts at a site, which rules lose, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, Match, keep
from narrowcast.plan.plan import Loser
from narrowcast.plan.tree import Site

__all__ = ["Choice", "Resolver", "quoted"]

EXACT_WINS = "an exact key wins over patterns"
KEEP_WINS = "keep wins over other patterns"
SAME = "gives the same policy as the rule that counts"
FIRST_COUNTS = "overlaps with the rule that counts, which comes first"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a map says of one site.

    Args:
        asked: the policy; `None` where no rule matches and the map has no default.
        rule: the key that counts; `None` where no rule matches.
        losers: the other keys that match.
        overlap: the keys that contradict each other; empty where none do.
        where: the path at which they do, and the other path where they match different paths of one site.
    """

    asked: DTypePolicy | None
    rule: str | None = None
    losers: tuple[Loser, ...] = ()
    overlap: tuple[str, ...] = ()
    where: tuple[str, ...] = ()


@dataclass(slots=True)
class _Match:
    """The rules at one path."""

    path: str
    winners: list[str]
    losers: dict[str, str] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        return self.winners[0]


class Resolver:
    """Looks sites up in one map.

    Args:
        policies: the map; it is not changed.
    """

    def __init__(self, policies: DTypePolicyMap) -> None:
        self._map = policies
        self.rules: dict[str, DTypePolicy] = dict(policies.items())
        self.default = policies.default_policy if policies.has_default else None
        self._chosen: dict[tuple[str | None, tuple[str, ...]], Choice] = {}

    def choose(self, site: Site) -> Choice:
        """Returns what the map says of `site`.

        At one path, an exact key wins over patterns, and a `keep` pattern over other patterns. The rules of all paths
        of a shared or tied site must agree.
        """
        members = site.members
        paths = members[0].paths if len(members) == 1 else site.paths
        if len(paths) == 1:
            return self._choose_alone(paths[0])
        matches = [match for match in (self._match(path, self._map.match(path)) for path in paths) if match is not None]
        if not matches:
            return Choice(self.default)
        return self._alone(matches[0]) if len(matches) == 1 else self._together(matches)

    def _choose_alone(self, path: str) -> Choice:
        """The choice at one path: the same wherever the same rules match, unless it names the path."""
        found = self._map.match(path)
        key = (found.exact, found.patterns)
        choice = self._chosen.get(key)
        if choice is None:
            match = self._match(path, found)
            choice = Choice(self.default) if match is None else self._alone(match)
            if not choice.overlap:
                self._chosen[key] = choice
        return choice

    def _match(self, path: str, found: Match) -> _Match | None:
        if found.exact is not None:
            return _Match(path, [found.exact], dict.fromkeys(found.patterns, EXACT_WINS))
        if not found.patterns:
            return None
        kept = [key for key in found.patterns if self.rules[key] is keep]
        if kept:
            return _Match(path, kept, {key: KEEP_WINS for key in found.patterns if key not in kept})
        return _Match(path, list(found.patterns))

    def _alone(self, match: _Match) -> Choice:
        policy = self.rules[match.rule]
        overlap = self._contradicting(match)
        losers = [Loser(key, self.rules[key], self._beside(key, policy)) for key in match.winners[1:]]
        losers += [Loser(key, self.rules[key], reason) for key, reason in match.losers.items()]
        return Choice(policy, match.rule, tuple(losers), overlap, (match.path,) if overlap else ())

    def _together(self, matches: list[_Match]) -> Choice:
        """One choice for several paths: they must agree; where they do not, `keep` counts, else the first."""
        first = matches[0]
        leader = next((match for match in matches if self.rules[match.rule] is keep), first)
        rule, policy = leader.rule, self.rules[leader.rule]
        losers: dict[str, str] = {}
        overlap: tuple[str, ...] = ()
        where: tuple[str, ...] = ()
        for match in matches:
            inner = self._contradicting(match)
            if inner and not overlap:
                overlap, where = inner, (match.path,)
            elif self.rules[match.rule] != policy and not overlap:
                overlap, where = (rule, match.rule), (leader.path, match.path)
            for key in match.winners:
                losers.setdefault(key, self._beside(key, policy))
            for key, reason in match.losers.items():
                losers.setdefault(key, reason)
        losers.pop(rule, None)
        found = tuple(Loser(key, self.rules[key], reason) for key, reason in losers.items())
        return Choice(policy, rule, found, overlap, where)

    def _contradicting(self, match: _Match) -> tuple[str, ...]:
        policy = self.rules[match.rule]
        others = [key for key in match.winners[1:] if self.rules[key] != policy]
        return (match.rule, *others) if others else ()

    def _beside(self, key: str, policy: DTypePolicy) -> str:
        return SAME if self.rules[key] == policy else FIRST_COUNTS


def quoted(key: str) -> str:
    """Returns a key as it stands in a policy file: in single quotes, its backslashes as they are."""
    return f"'{key}'"
