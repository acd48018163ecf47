r"""The check that a regular expression cannot backtrack without end, made once, when a key is inserted.

`re` tries one way after another to match, and holds the interpreter meanwhile. Its time on a text of `n` characters is
at most the number of *partial ways* of the expression, each at the measured price of its kind of step. It is found from
the expression alone, as a polynomial in `n`:

- a part that can stop at one place only (a literal, `\d+` before a `/`) has one way;
- a part that can stop anywhere (`.*`) multiplies the ways of what follows. `d` of them in a row stop at increasing
  places, hence `n**d / d!` ways, and `1 / p` of these where a literal must follow that can overlap itself only after
  `p` characters;
- alternatives add up, unless their first characters differ;
- a group inside a repeat must be *unambiguous*: no text leads round the loop in two ways. Otherwise each time round
  doubles the ways, and the expression is refused (`ambiguity`). An unambiguous one reaches each place in one way.

The bound is never too low. Where it is too high, a harmless expression is refused, and the message says what to change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from narrowcast.dtype_policies.ambiguity import Loop
from narrowcast.dtype_policies.expression import (
    EVERYTHING,
    Alternation,
    Anchor,
    Atomic,
    Characters,
    Concatenation,
    Look,
    Node,
    Ranges,
    Reference,
    Repeat,
    first_of,
    looks_of,
    overlap,
    union,
)

__all__ = ["MAX_SECONDS", "RunawayError", "estimate_seconds"]

MAX_SECONDS = 1.0
"""The longest that an expression may take on the longest path, by the prices below. Paths of usual length take some
hundred thousand times less."""
# Prices in nanoseconds, measured on two nested repeats (n**2 / 2 steps, n = 1,024; CPython 3.11, AMD EPYC, CPU time)
# and rounded up. An end of a greedy repeat of one set took 13 (`.*`), 16 (`\w*`), 21 (`a*` at the end of a branch);
# of a lazy one 22, with a look-around or `\B` 36, of a group 35, with a branch in it 48, under IGNORECASE 44, of an
# optional group 43. A character of a literal took 3.5, and a capturing group added 6.5.
_FAST = 25.0
_SLOW = 50.0
_LITERAL = 4.0
_GROUP_SHARE = 1 / 3  # what a capturing group adds to any step, in steps of the fastest kind

_MAX_DEGREE = 8
_FEW = 64  # ends of a counted repeat up to which they are counted one by one
_NEWLINE: Ranges = ((10, 10),)

Polynomial = tuple[float, ...]
"""Coefficients `c[d]` of `n**d / d!`: in this basis, the ways of parts in a row multiply as plain polynomials do."""

_NONE: Polynomial = (0.0,)
_ONE: Polynomial = (1.0,)
_ANYWHERE: Polynomial = (1.0, 1.0)


class _Follow(NamedTuple):
    """What may come next: with which characters it begins (none: the text ends), in how many looks."""

    first: Ranges = ()
    num_looks: int = 1


_ANYTHING = _Follow(EVERYTHING)


class RunawayError(Exception):
    """An expression can backtrack without end; the text says where."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a part costs from one starting place.

    Args:
        ways: in how many ways it can match, all ends counted, if what follows agrees.
        time: how long all partial ways take, in nanoseconds.
    """

    ways: Polynomial
    time: Polynomial


def estimate_seconds(node: Node, length: int, *, is_one_line: bool, num_groups: int = 0) -> float:
    r"""Returns an upper bound of the time that matching takes on any text of at most `length` characters.

    Args:
        node: the expression. The whole text must match.
        length: the longest text.
        is_one_line: whether no text holds a line feed, so that `.*` at the end always matches.
        num_groups: how many capturing groups the expression has.

    Raises:
        RunawayError: the bound is exponential, or above `MAX_SECONDS`.

    Example:
        >>> from narrowcast.dtype_policies.expression import parse
        >>> estimate_seconds(parse(r"layer/\d+/.*"), 1024, is_one_line=True) < 1e-3
        True
        >>> estimate_seconds(parse("(a+)+x"), 1024, is_one_line=True)
        Traceback (most recent call last):
        ...
        narrowcast.dtype_policies.runaway.RunawayError: a repeat inside a repeat can read the same text in two ways
    """
    time = _value(_cost(node, _Follow(), length, is_last=is_one_line).time, length)
    seconds = time * 1e-9 * (1.0 + _GROUP_SHARE * num_groups)
    if seconds > MAX_SECONDS:
        raise RunawayError("several parts that can stop anywhere follow one another")
    return seconds


def _value(polynomial: Polynomial, length: int) -> float:
    return sum(c * float(length**d) / math.factorial(d) for d, c in enumerate(polynomial))


def _add(first: Polynomial, second: Polynomial) -> Polynomial:
    return tuple(a + b for a, b in _aligned(first, second))


def _largest(first: Polynomial, second: Polynomial) -> Polynomial:
    return tuple(max(a, b) for a, b in _aligned(first, second))


def _aligned(first: Polynomial, second: Polynomial) -> list[tuple[float, float]]:
    size = max(len(first), len(second))
    return list(zip(first + (0.0,) * (size - len(first)), second + (0.0,) * (size - len(second)), strict=True))


def _multiply(first: Polynomial, second: Polynomial) -> Polynomial:
    if len(first) == 1 and first[0] == 1.0:
        return second
    product = [0.0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            product[i + j] += a * b
    if len(product) > _MAX_DEGREE or max(product) > MAX_SECONDS * 1e9:
        raise RunawayError("several parts that can stop anywhere, or in many ways, follow one another")
    return tuple(product)


def _cost(node: Node, follow: _Follow, length: int, *, is_last: bool) -> Cost:
    """The cost of `node` before `follow`."""
    match node:
        case Characters():
            return Cost(_ONE, (_LITERAL if node.literal else _SLOW * node.num_looks,))
        case Anchor():
            return Cost(_ONE, (_SLOW,))
        case Reference():
            return Cost(_ONE, (_SLOW, _LITERAL))
        case Concatenation():
            return _concatenation(node, follow, length, is_last=is_last)
        case Alternation():
            return _alternation(node, follow, length, is_last=is_last)
        case Look() | Atomic():
            return Cost(_ONE, _add((_SLOW,), _cost(node.body, _ANYTHING, length, is_last=False).time))
        case Repeat(body=Characters()):
            return _simple_repeat(node, follow, "", is_last=is_last)
        case Repeat():
            return _repeat(node, follow, length, is_last=is_last)
    raise NotImplementedError(type(node).__name__)


def _concatenation(node: Concatenation, follow: _Follow, length: int, *, is_last: bool) -> Cost:
    items = node.items
    last = len(items) - 1
    while last > 0 and _is_end(items[last]):
        last -= 1  # `.*$` ends where `.*` does
    ways, time = _ONE, _NONE
    num_counted = 0  # characters of a literal whose time the repeat before it has counted
    for index, item in enumerate(items):
        rest = items[index + 1 :]
        after = _Follow(first_of(rest, follow.first), looks_of(rest, follow.num_looks))
        ends = is_last and index == last
        if isinstance(item, Repeat) and isinstance(item.body, Characters):
            literal = _literal(rest)
            cost = _simple_repeat(item, after, literal, is_last=ends)
            num_counted = len(literal)
        elif num_counted:
            cost = Cost(_ONE, _NONE)
            num_counted -= 1
        else:
            cost = _cost(item, after, length, is_last=ends)
        time = _add(time, _multiply(ways, cost.time))
        ways = _multiply(ways, cost.ways)
    return Cost(ways, time)


def _is_end(node: Node) -> bool:
    return isinstance(node, Anchor) and node.is_end


def _literal(items: tuple[Node, ...]) -> str:
    """The literal text with which the items begin."""
    text = ""
    for item in items:
        if not (isinstance(item, Characters) and item.literal):
            break
        text += item.literal
    return text


def _simple_repeat(node: Repeat, follow: _Follow, literal: str, *, is_last: bool) -> Cost:
    """A repeat of one set of characters, before `literal`."""
    characters = node.body.first
    # To go on by one character, and to stop there and look at what follows.
    price = (_FAST if node.is_fast else _SLOW) + _SLOW * (node.body.num_looks - 1)
    if is_last and node.most is None and union(characters, _NEWLINE) == EVERYTHING and not node.is_possessive:
        return Cost(_ONE, (price * (node.least + 1),))  # `.*` at the end takes the rest of the line and is done
    if node.least == node.most:
        return Cost(_ONE, (price * (node.least + 1) + _LITERAL * len(literal),))
    if node.is_possessive or not overlap(characters, follow.first):
        return Cost(_ONE, (price + _LITERAL * len(literal), price + _SLOW * (follow.num_looks - 1)))
    periods = _periods(literal)
    # Each beginning of the literal can be read at one place in `period`; only whole ones go on.
    reading = _LITERAL * sum(1.0 / period for period in periods[:-1])
    if node.most is not None and node.most - node.least < _FEW:
        ends = float(node.most - node.least + 1)
        return Cost((ends,), (price * node.most + ends * (price + _LITERAL * len(literal)),))
    ways = (1.0, 1.0 / periods[-1]) if literal else _ANYWHERE
    return Cost(ways, (price + _LITERAL * len(literal), price + reading))


def _periods(literal: str) -> list[int]:
    """For each beginning of `literal`, the smallest distance at which it can overlap itself (Knuth, Morris, Pratt)."""
    borders = [0] * len(literal)
    periods = [1] if literal else []
    for end in range(1, len(literal)):
        border = borders[end - 1]
        while border and literal[end] != literal[border]:
            border = borders[border - 1]
        if literal[end] == literal[border]:
            border += 1
        borders[end] = border
        periods.append(end + 1 - border)
    return periods


def _alternation(node: Alternation, follow: _Follow, length: int, *, is_last: bool) -> Cost:
    costs = [_cost(item, follow, length, is_last=is_last) for item in node.items]
    ways, time = costs[0].ways, _add((_SLOW * (1 + len(costs)),), costs[0].time)
    combine = _largest if _are_apart(node.items) else _add
    for cost in costs[1:]:
        ways, time = combine(ways, cost.ways), _add(time, cost.time)
    return Cost(ways, time)


def _are_apart(items: tuple[Node, ...]) -> bool:
    """Whether the first character says which of the items it is."""
    if any(item.can_be_empty for item in items):
        return False
    seen: Ranges = ()
    for item in items:
        if overlap(seen, item.first):
            return False
        seen = union(seen, item.first)
    return True


def _repeat(node: Repeat, follow: _Follow, length: int, *, is_last: bool) -> Cost:
    """A repeat of a group."""
    body = node.body
    stop = _SLOW * (1 + follow.num_looks)
    if node.most == 0:
        return Cost(_ONE, (_SLOW,))
    if node.most == 1 and not node.is_possessive:
        cost = _cost(body, follow, length, is_last=is_last)
        if node.least == 1:
            return cost
        apart = not body.can_be_empty and not overlap(body.first, follow.first)
        ways = _largest(_ONE, cost.ways) if apart else _add(_ONE, cost.ways)
        return Cost(ways, _add((_SLOW + stop,), cost.time))
    if node.is_possessive:
        inside = _cost(body, _ANYTHING, length, is_last=False)
        return Cost(_ONE, _multiply((1.0 + node.least, 1.0), _add((_SLOW,), inside.time)))
    loop = Loop(body)
    reason = loop.ambiguity()
    if not reason:
        apart = not overlap(body.first, follow.first)
        ways = _ONE if apart else _ANYWHERE
        time = _SLOW * (1 + body.num_looks) + stop
        return Cost(ways, (time, _SLOW * (1 + loop.num_looks) + stop))
    if node.most is None or node.most > length:
        raise RunawayError(reason)
    return _power(node, _Follow(union(body.first, follow.first), body.num_looks + follow.num_looks), length)


def _power(node: Repeat, follow: _Follow, length: int) -> Cost:
    """A counted repeat of an ambiguous group: each time round multiplies."""
    cost = _cost(node.body, follow, length, is_last=False)
    once = _add((_SLOW * (1 + follow.num_looks),), cost.time)
    ways, time = _NONE if node.least else _ONE, _NONE
    power = _ONE
    for number in range(1, (node.most or 0) + 1):
        time = _add(time, _multiply(power, once))
        power = _multiply(power, cost.ways)
        if number >= node.least:
            ways = _add(ways, power)
    return Cost(ways, time)
