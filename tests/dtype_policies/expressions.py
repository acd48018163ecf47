"""Random regular expressions, and a backtracking matcher that counts what it tries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import strategies as st

from narrowcast.dtype_policies.expression import (
    Alternation,
    Anchor,
    Atomic,
    Characters,
    Concatenation,
    Look,
    Node,
    Reference,
    Repeat,
)

_ATOMS = ["a", "b", "/", "7", ".", "[ab]", "[^/]", "[^a]", r"\d", r"\w", r"\W", "ab", "a/", "/7/", "(?i:b)", "(?:)"]
_QUANTIFIERS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}", "{2,}", "*+", "++"]

EXPRESSIONS = st.recursive(
    st.sampled_from([*_ATOMS, *_ATOMS, "^", "$", r"\b", "(?=a)", "(?!b)"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(_QUANTIFIERS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda text: f"(?>{text})"),
    ),
    max_leaves=8,
)

# Few characters and many repeats: most of these can be matched in several ways.
AMBIGUOUS = st.recursive(
    st.sampled_from(["a", "a", "b", "[ab]", ".", "ab", "a?", "a*", ".*", "a{1,3}"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=5).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=10,
)

PATHS = st.text("aB/7_b", max_size=12)


class TooManyError(Exception):
    """The matcher tried more than it was allowed to."""


class Matcher:
    """Matches as `re` does, one way after another, and counts the characters that it looks at.

    Written from the meaning of the operators alone; it shares with the library only the tree that an expression is read
    into, and is itself compared with `re`.
    """

    def __init__(self, text: str, limit: float) -> None:
        self.text = text
        self.limit = limit
        self.num_looks = 0

    def fullmatch(self, node: Node) -> bool:
        return any(end == len(self.text) for end in self.ends(node, 0))

    def ends(self, node: Node, start: int) -> Iterator[int]:
        match node:
            case Characters():
                self.num_looks += 1
                if self.num_looks > self.limit:
                    raise TooManyError
                if start < len(self.text) and any(a <= ord(self.text[start]) <= b for a, b in node.first):
                    yield start + 1
            case Concatenation():
                yield from self._chain(node.items, start)
            case Alternation():
                for item in node.items:
                    yield from self.ends(item, start)
            case Repeat(is_possessive=True):
                yield from self._first(self._repeat(node, start, 0))
            case Repeat():
                yield from self._repeat(node, start, 0)
            case Atomic():
                yield from self._first(self.ends(node.body, start))
            case Look():
                # Whether it holds decides nothing about how much is tried after it at most: take it that it does.
                for _ in self._first(self.ends(node.body, start)):
                    pass
                yield start
            case Anchor() | Reference():
                yield start

    def _chain(self, items: tuple[Node, ...], start: int) -> Iterator[int]:
        if not items:
            yield start
            return
        for middle in self.ends(items[0], start):
            yield from self._chain(items[1:], middle)

    def _repeat(self, node: Repeat, start: int, done: int) -> Iterator[int]:
        if node.most is None or done < node.most:
            for middle in self.ends(node.body, start):
                if middle > start or done < node.least:  # an empty round more would go on for ever
                    yield from self._repeat(node, middle, done + 1)
        if done >= node.least:
            yield start

    @staticmethod
    def _first(ends: Iterator[int]) -> Iterator[int]:
        for end in ends:
            yield end
            return


def worst_texts(length: int) -> list[str]:
    """Texts on which repeats fail late: one character, alternating ones, each with an end that fits nothing."""
    fills: list[Callable[[int], str]] = [
        lambda n: "a" * n,
        lambda n: "b" * n,
        lambda n: "7" * n,
        lambda n: "/" * n,
        lambda n: ("ab" * n)[:n],
        lambda n: ("a/" * n)[:n],
        lambda n: ("/7" * n)[:n],
        lambda n: "a" * (n // 2) + "b" * (n - n // 2),
    ]
    return [fill(length - 1) + end for fill in fills for end in ("!", "")]
