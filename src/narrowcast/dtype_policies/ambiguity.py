r"""Whether a group inside a repeat can read one text in two ways: then each time round doubles the ways to match.

The positions of a group are its sets of characters; an edge leads from each to those that may come next, round the loop
too (the automaton of Glushkov). The group is ambiguous if two different walks read the same text between the same two
positions. Walks are followed in pairs.

References:
    Glushkov, The abstract theory of automata, 1961; Weber and Seidl, On the degree of ambiguity of finite automata,
    1991, section 3 (exponential ambiguity).
"""

from __future__ import annotations

from narrowcast.dtype_policies.expression import (
    Alternation,
    Anchor,
    Characters,
    Concatenation,
    Node,
    Ranges,
    Repeat,
    overlap,
)

__all__ = ["Loop"]

_MAX_POSITIONS = 300
_MAX_PAIR_STEPS = 200_000
_TWICE = "a repeat inside a repeat can read the same text in two ways"
_TOO_LONG = "the part inside a repeat is too long to be checked"
_EMPTY = "the part inside a repeat can be empty"
_NOT_PLAIN = "a look-around, a back-reference or an atomic group stands inside a repeat"

_Ways = dict[int, int]
"""Positions, and in how many ways they are reached; 2 stands for more than one."""

_Part = tuple[int, _Ways, _Ways]
"""The ways to be empty, the first positions, the last positions."""


class Loop:
    """The positions of a group inside a repeat: every set of characters in it, and which may follow which.

    Numbers of ways between two positions saturate at 2. Counted repeats inside are read as unlimited ones, which has
    at least as many ways.
    """

    def __init__(self, body: Node) -> None:
        self.sets: list[Ranges] = []
        self.looks: list[int] = []
        self.follow: list[_Ways] = []
        self.num_parts = 0  # alternations and repeats
        self.problem = ""
        empty, first, last = self._build(body)
        if empty:
            self._fail(_EMPTY)
        self._link(last, first)

    @property
    def num_looks(self) -> int:
        """How many looks it takes at most, all positions together, to find what may come after each of them."""
        return sum(self.num_parts + 1 + sum(self.looks[b] for b in follow) for follow in self.follow)

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _link(self, last: _Ways, first: _Ways) -> None:
        for a, ways_a in last.items():
            for b, ways_b in first.items():
                self.follow[a][b] = min(2, self.follow[a].get(b, 0) + ways_a * ways_b)

    def _build(self, node: Node) -> _Part:
        """The ways to be empty, and the first and the last positions with the ways to reach them."""
        if len(self.sets) > _MAX_POSITIONS:
            self._fail(_TOO_LONG)
            return 0, {}, {}
        match node:
            case Characters():
                self.sets.append(node.first)
                self.looks.append(node.num_looks)
                self.follow.append({})
                index = len(self.sets) - 1
                return 0, {index: 1}, {index: 1}
            case Anchor():
                self.num_parts += 1
                return 1, {}, {}
            case Concatenation():
                return self._chain(node.items)
            case Alternation():
                self.num_parts += 1
                return self._choice(node.items)
            case Repeat(is_possessive=False):
                self.num_parts += 1
                return self._round(node)
        self._fail(_NOT_PLAIN)
        return 0, {}, {}

    def _chain(self, items: tuple[Node, ...]) -> _Part:
        empty, first, last = 1, _Ways(), _Ways()
        for item in items:
            item_empty, item_first, item_last = self._build(item)
            self._link(last, item_first)
            first = _plus(first, item_first, empty)
            last = _plus(item_last, last, item_empty)
            empty = min(2, empty * item_empty)
        return empty, first, last

    def _choice(self, items: tuple[Node, ...]) -> _Part:
        empty, first, last = 0, _Ways(), _Ways()
        for item in items:
            item_empty, item_first, item_last = self._build(item)
            empty, first, last = min(2, empty + item_empty), _plus(first, item_first, 1), _plus(last, item_last, 1)
        return empty, first, last

    def _round(self, node: Repeat) -> _Part:
        empty, first, last = self._build(node.body)
        if node.most == 0:
            return 1, {}, {}
        if node.most == 1:
            return (min(2, empty + 1), first, last) if node.least == 0 else (empty, first, last)
        if empty:
            self._fail(_EMPTY)
        self._link(last, first)
        return int(node.least == 0), first, last

    def ambiguity(self) -> str:
        """Returns why two ways may lead round the loop on one text, or `''` if none can."""
        if self.problem:
            return self.problem
        if any(ways > 1 for follow in self.follow for ways in follow.values()):
            return _TWICE
        seen: set[tuple[int, int]] = set()
        todo = [(index, index) for index in range(len(self.sets))]
        num_steps = 0
        while todo:
            left, right = todo.pop()
            for a in self.follow[left]:
                for b in self.follow[right]:
                    num_steps += 1
                    if left == right and a >= b:
                        continue  # the same step twice, or the mirror image of another pair
                    if not overlap(self.sets[a], self.sets[b]):
                        continue
                    if a == b:
                        return _TWICE
                    pair = (min(a, b), max(a, b))
                    if pair not in seen:
                        seen.add(pair)
                        todo.append(pair)
            if num_steps > _MAX_PAIR_STEPS:
                return _TOO_LONG
        return ""


def _plus(first: _Ways, second: _Ways, ways: int) -> _Ways:
    """Adds `second`, each way taken `ways` times, to a copy of `first`."""
    if not ways:
        return first
    total = dict(first)
    for index, count in second.items():
        total[index] = min(2, total.get(index, 0) + ways * count)
    return total
