r"""A regular expression as a small tree, read from Python's own parser.

Two things need it: the check that an expression cannot backtrack without end (`runaway`), and the literal text that
every match must hold, by which thousands of patterns are found quickly (`pattern`). Sets of characters are
over-approximated (`\w` holds every character beyond ASCII): the tree says which texts *may* match, never which do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "Alternation",
    "Anchor",
    "Atomic",
    "Characters",
    "Concatenation",
    "Look",
    "Node",
    "Reference",
    "Repeat",
    "parse",
]

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive ranges of code points."""

_LAST = 0x10FFFF
_BEYOND_ASCII = (128, _LAST)
EVERYTHING: Ranges = ((0, _LAST),)
_ANY_BUT_NEWLINE: Ranges = ((0, 9), (11, _LAST))
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = ((9, 13), (28, 32))
_ONE_CHARACTER = ("ANY", "IN", "LITERAL", "NOT_LITERAL")
_LAST_IN_TABLE = 0xFFFF
_LISTED_PER_LOOK = 16  # at 2.5 ns, they take as long as another look


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the characters that are in any of the sets.

    Example:
        >>> union([(1, 3)], [(4, 5), (9, 9)])
        ((1, 5), (9, 9))
    """
    merged: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Returns every other character.

    Example:
        >>> complement(((0, 96), (98, 0x10FFFF)))
        ((97, 97),)
    """
    found = []
    start = 0
    for low, high in ranges:
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        found.append((start, _LAST))
    return tuple(found)


def overlap(first: Ranges, second: Ranges) -> bool:
    """Says whether two sets have a character in common.

    Example:
        >>> overlap(((1, 3), (7, 9)), ((4, 7),)), overlap(((1, 3),), ((4, 7),))
        (True, False)
    """
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][1] < second[j][0]:
            i += 1
        elif second[j][1] < first[i][0]:
            j += 1
        else:
            return True
    return False


class Node:
    """A part of an expression.

    Attributes:
        first: the characters with which what it matches may begin.
        can_be_empty: whether it may match no character.
        min_length: the fewest characters that it matches.
        num_looks: how many looks, at sets of characters and at the parts around them, it takes at most to find that it
            does not begin here.
    """

    __slots__ = ("can_be_empty", "first", "min_length", "num_looks")

    def __init__(
        self, first: Ranges = (), *, can_be_empty: bool = True, min_length: int = 0, num_looks: int = 1
    ) -> None:
        self.first = first
        self.can_be_empty = can_be_empty
        self.min_length = min_length
        self.num_looks = num_looks


class Characters(Node):
    """One character out of a set; `literal` is that character where there is only one, else `''`."""

    __slots__ = ("literal",)

    def __init__(self, ranges: Ranges, literal: str = "", num_looks: int = 1) -> None:
        super().__init__(ranges, can_be_empty=False, min_length=1, num_looks=num_looks)
        self.literal = literal


class Concatenation(Node):
    """One part after the other; no item is a `Concatenation` itself."""

    __slots__ = ("items",)
    items: tuple[Node, ...]

    def __init__(self, items: Sequence[Node]) -> None:
        flat: list[Node] = []
        for item in items:
            flat.extend(item.items if isinstance(item, Concatenation) else [item])
        self.items = tuple(flat)
        super().__init__(
            first_of(self.items),
            can_be_empty=all(item.can_be_empty for item in self.items),
            min_length=sum(item.min_length for item in self.items),
            num_looks=looks_of(self.items),
        )


class Alternation(Node):
    """One of several parts."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Node]) -> None:
        self.items = tuple(items)
        super().__init__(
            union(*(item.first for item in self.items)),
            can_be_empty=any(item.can_be_empty for item in self.items),
            min_length=min((item.min_length for item in self.items), default=0),
            num_looks=1 + sum(max(item.num_looks, 1) for item in self.items),
        )


class Repeat(Node):
    """A part several times, `least` to `most` (`None`: without limit).

    `is_fast` says that `re` reads it in a tight loop: one set of characters, greedy, in exact case.
    """

    __slots__ = ("body", "is_fast", "is_possessive", "least", "most")

    def __init__(
        self, body: Node, least: int, most: int | None, *, is_possessive: bool = False, is_fast: bool = False
    ) -> None:
        self.body = body
        self.least = least
        self.most = most
        self.is_possessive = is_possessive
        self.is_fast = is_fast
        super().__init__(
            body.first,
            can_be_empty=least == 0 or body.can_be_empty,
            min_length=least * body.min_length,
            num_looks=1 + body.num_looks,
        )


class Atomic(Node):
    """A part that is never tried in another way once it matched."""

    __slots__ = ("body",)

    def __init__(self, body: Node) -> None:
        self.body = body
        super().__init__(
            body.first, can_be_empty=body.can_be_empty, min_length=body.min_length, num_looks=1 + body.num_looks
        )


class Look(Node):
    """A look ahead or behind: it takes no character and is never tried in another way.

    What it reads has a cost at every place where it is tried, so that no character says that it is not: `first` is all.
    """

    __slots__ = ("body",)

    def __init__(self, body: Node) -> None:
        self.body = body
        super().__init__(EVERYTHING)


class Anchor(Node):
    r"""A place (`^`, `$`, `\b`); `is_end` where it is the end of the text."""

    __slots__ = ("is_end",)

    def __init__(self, *, is_end: bool) -> None:
        self.is_end = is_end
        super().__init__()


class Reference(Node):
    """What a group matched before, once more."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(EVERYTHING)


def first_of(items: Iterable[Node], follow: Ranges = ()) -> Ranges:
    """Returns the characters with which the items, one after the other and then `follow`, may begin."""
    sets = []
    for item in items:
        sets.append(item.first)
        if not item.can_be_empty:
            return union(*sets)
    return union(*sets, follow)


def looks_of(items: Iterable[Node], follow: int = 0) -> int:
    """Returns how many looks it takes to find that neither the items nor what follows them begin here."""
    looks = 0
    for item in items:
        looks += item.num_looks
        if not item.can_be_empty:
            return looks
    return looks + follow


def parse(key: str) -> Node:
    """Reads a regular expression that `re.compile` accepts.

    Raises:
        NotImplementedError: Python's parser gave an operation that is not known here.
    """
    parsed = re._parser.parse(key)  # type: ignore[attr-defined]
    return _concatenation(parsed, parsed.state.flags)


def _concatenation(parsed: Iterable[tuple[Any, Any]], flags: int) -> Node:
    items = [_node(str(operation), argument, flags) for operation, argument in parsed]
    return items[0] if len(items) == 1 else Concatenation(items)


def _node(operation: str, argument: Any, flags: int) -> Node:
    match operation:
        case "LITERAL":
            is_exact = not flags & re.IGNORECASE
            return Characters(_cased(((argument, argument),), flags), chr(argument) if is_exact else "")
        case "NOT_LITERAL":
            return Characters(complement(((argument, argument),)))
        case "ANY":
            return Characters(EVERYTHING if flags & re.DOTALL else _ANY_BUT_NEWLINE)
        case "IN":
            return Characters(_set(argument, flags), num_looks=1 + _num_listed(argument) // _LISTED_PER_LOOK)
        case "SUBPATTERN":
            _, added, removed, body = argument
            return _concatenation(body, (flags | added) & ~removed)
        case "BRANCH":
            return Alternation([_concatenation(branch, flags) for branch in argument[1]])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = argument
            unlimited = most >= re._constants.MAXREPEAT  # type: ignore[attr-defined]
            return Repeat(
                _concatenation(body, flags),
                int(least),
                None if unlimited else int(most),
                is_possessive=operation == "POSSESSIVE_REPEAT",
                is_fast=operation != "MIN_REPEAT"
                and len(body) == 1
                and str(body[0][0]) in _ONE_CHARACTER
                and not flags & re.IGNORECASE,
            )
        case "ATOMIC_GROUP":
            return Atomic(_concatenation(argument, flags))
        case "ASSERT" | "ASSERT_NOT":
            return Look(_concatenation(argument[1], flags))
        case "AT":
            return Anchor(is_end=str(argument) in ("AT_END", "AT_END_STRING"))
        case "GROUPREF":
            return Reference()
        case "GROUPREF_EXISTS":
            _, yes, no = argument
            return Alternation([_concatenation(yes, flags), _concatenation(no or (), flags)])
        case "FAILURE":
            return Look(Concatenation(()))
    raise NotImplementedError(operation)


def _num_listed(items: Iterable[tuple[Any, Any]]) -> int:
    """How many members of a set `re` tries one by one: those beyond 16 bits, as all others have a bit in a table."""
    ends = [
        argument if str(operation) == "LITERAL" else argument[1]
        for operation, argument in items
        if str(operation) in ("LITERAL", "RANGE")
    ]
    return sum(end > _LAST_IN_TABLE for end in ends)


def _set(items: Iterable[tuple[Any, Any]], flags: int) -> Ranges:
    items = [(str(operation), argument) for operation, argument in items]
    is_negated = items[0][0] == "NEGATE"
    # What is not in the set may be in its complement: the set itself is then under-approximated, by its ASCII part.
    ranges = union(*(_set_item(operation, argument, is_exact=is_negated) for operation, argument in items))
    return complement(ranges) if is_negated else _cased(ranges, flags)


def _set_item(operation: str, argument: Any, *, is_exact: bool) -> Ranges:
    match operation:
        case "NEGATE":
            return ()
        case "LITERAL":
            return ((argument, argument),)
        case "RANGE":
            return (argument,)
        case "CATEGORY":
            name = str(argument).removeprefix("CATEGORY_")
            inner = {"DIGIT": _DIGITS, "WORD": _WORD, "SPACE": _SPACES}[name.removeprefix("NOT_")]
            if name.startswith("NOT_"):
                inner = complement(union(inner, (_BEYOND_ASCII,)))
            return inner if is_exact else union(inner, (_BEYOND_ASCII,))
    raise NotImplementedError(operation)


def _cased(ranges: Ranges, flags: int) -> Ranges:
    """The set with all that `IGNORECASE` may let in: the other case, and for letters anything beyond ASCII."""
    if not flags & re.IGNORECASE:
        return ranges
    upper, lower = (65, 90), (97, 122)
    beyond = overlap(ranges, (_BEYOND_ASCII,))
    letters = [
        (max(low, a), min(high, b)) for low, high in ranges for a, b in (upper, lower) if max(low, a) <= min(high, b)
    ]
    swapped = [(low ^ 32, high ^ 32) for low, high in letters]
    # A few letters beyond ASCII fold to ASCII ones (the Kelvin sign to k, the long s to s, dotless i to i).
    extra = [upper, lower] if beyond else []
    return union(ranges, swapped, extra, [_BEYOND_ASCII] if letters or beyond else [])
