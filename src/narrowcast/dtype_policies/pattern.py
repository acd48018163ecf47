"""One compiled key of a map, and an index that finds the patterns matching a path among thousands.

The index goes by literal text. Every match of `.*/7/(attn|mlp)/.*_proj` has a segment `7` between two slashes, and one
that ends with `_proj`; of all such features of a pattern, the one that the fewest other patterns share decides where it
is filed. A path looks up the features that it has itself and tries only what is filed there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from narrowcast.dtype_policies.expression import Characters, Concatenation, Node, parse
from narrowcast.dtype_policies.runaway import RunawayError, estimate_seconds
from narrowcast.errors import PatternError, PolicyError

__all__ = ["MAX_KEY_LENGTH", "MAX_PATH_LENGTH", "USUAL_PATH_LENGTH", "Pattern", "PatternIndex"]

MAX_KEY_LENGTH = 1024
"""The longest key that a map takes, in characters."""
MAX_PATH_LENGTH = 1024
"""The longest path that is looked up, in characters."""
USUAL_PATH_LENGTH = 256
"""The longest path that every pattern is tried on. One such as `.*/attn/.*_proj/.*x`, with three parts that can stop
anywhere, takes some hundredths of a second on it, and too long on one of `MAX_PATH_LENGTH`."""
_STAR_FIX = "Write .* for any text: a key is no shell pattern"
_ESCAPE_FIX = "Escape characters that are meant literally with a backslash, or use `re.escape`"
_SIZE = 3  # characters of a feature that is no whole segment: shorter ones are shared by too many paths
_CROWDED = 8  # patterns under one feature, from which cutting every path into pieces is worth its time


class _Where(Enum):
    """Where in a path the text of a feature stands."""

    SEGMENT = "a whole part between two slashes, or an end of the path and a slash"
    TAIL = "the end of such a part"
    HEAD = "its beginning"
    PIECE = "anywhere"


_Feature = tuple[_Where, str]


class _Limit(NamedTuple):
    """The paths on which a pattern's time is bounded: their greatest length, and whether they are of one line only."""

    length: int
    is_for_one_line: bool


@dataclass(frozen=True, slots=True)
class _Compiled:
    expression: re.Pattern[str]
    features: tuple[_Feature, ...]
    longest: str
    limit: _Limit


class Pattern:
    r"""A key read as a regular expression that must match a whole path.

    Args:
        key: a regular expression of Python's `re`.

    Raises:
        PatternError: the key is no regular expression, is longer than `MAX_KEY_LENGTH`, or can backtrack without end.

    Example:
        >>> Pattern(r"encoder/layer/\d+/.*").matches("encoder/layer/3/query")
        True
        >>> Pattern(r"encoder").matches("encoder/layer")
        False
    """

    __slots__ = ("_compiled", "key")

    def __init__(self, key: str) -> None:
        if len(key) > MAX_KEY_LENGTH:
            raise PatternError(
                "Key is too long",
                got={"length": len(key), "key": key[:60] + "…"},
                expected=f"at most {MAX_KEY_LENGTH} characters",
                fix="Split it into several rules",
            )
        self._compiled = _compile(key)
        self.key = key

    @property
    def features(self) -> tuple[_Feature, ...]:
        """What every path that matches has, each once."""
        return self._compiled.features

    def matches(self, path: str) -> bool:
        """Says whether the pattern matches the whole of `path`.

        Raises:
            PolicyError: the path is longer than `MAX_PATH_LENGTH`; or it is longer than `USUAL_PATH_LENGTH`, or holds a
                line feed, and this pattern could take too long on it.
        """
        _check(path)
        return self._matches(path)

    def _matches(self, path: str) -> bool:
        compiled = self._compiled
        if compiled.longest not in path:
            return False
        if len(path) > compiled.limit.length:
            raise PolicyError(
                f"Path is too long for the pattern {self.key!r}, which could take too long on it",
                got={"length": len(path), "path": path[:60] + "…"},
                expected=f"at most {compiled.limit.length} characters",
                fix="Use [^/]* for one part of a path instead of .* in the pattern",
            )
        if compiled.limit.is_for_one_line and "\n" in path:
            raise PolicyError(
                f"Path holds a line feed, with which the pattern {self.key!r} could take too long",
                got={"path": path},
                expected="a path of one line",
            )
        return compiled.expression.fullmatch(path) is not None

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Pattern) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Pattern({self.key!r})"


@lru_cache(maxsize=4096)
def _compile(key: str) -> _Compiled:
    try:
        expression = re.compile(key)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(
            f"Key is not a regular expression: {error}",
            got={"key": key},
            expected="a regular expression of Python's re, or an exact path",
            fix=_STAR_FIX if key.startswith("*") else _ESCAPE_FIX,
        ) from None
    try:
        node = parse(key)
        limit = _limit(node, expression.groups)
    except RunawayError as error:
        raise PatternError(
            f"Key can backtrack without end: {error}",
            got={"key": key},
            expected="a pattern whose time is bounded",
            fix="Use [^/]* for one part of a path instead of .*, and no repeat inside a repeat",
        ) from None
    except (NotImplementedError, RecursionError):
        raise PatternError(
            "Key cannot be checked for endless backtracking: it is nested too deeply, or uses rare syntax",
            got={"key": key},
            fix="Write it in a simpler form",
        ) from None
    longest = max((text for text, _, _ in _runs(node)), key=len, default="")
    return _Compiled(expression, tuple(dict.fromkeys(_features(node))), longest, limit)


_LIMITS = [
    _Limit(length, is_one_line) for length in (MAX_PATH_LENGTH, USUAL_PATH_LENGTH) for is_one_line in (False, True)
]


def _limit(node: Node, num_groups: int) -> _Limit:
    """The widest limit within which the pattern is bounded; raises `RunawayError` if there is none."""
    for limit in _LIMITS[:-1]:
        try:
            estimate_seconds(node, limit.length, is_one_line=limit.is_for_one_line, num_groups=num_groups)
        except RunawayError:
            continue
        return limit
    estimate_seconds(node, _LIMITS[-1].length, is_one_line=True, num_groups=num_groups)
    return _LIMITS[-1]


def _check(path: str) -> None:
    if len(path) > MAX_PATH_LENGTH:
        raise PolicyError(
            "Path is too long",
            got={"length": len(path), "path": path[:60] + "…"},
            expected=f"at most {MAX_PATH_LENGTH} characters",
        )


def _runs(node: Node) -> Iterator[tuple[str, bool, bool]]:
    """The literal runs of an expression that is a row of parts: `(text, is at the beginning, is at the end)`."""
    items = node.items if isinstance(node, Concatenation) else (node,)
    text, start = "", 0
    for index, item in enumerate(items):
        if isinstance(item, Characters) and item.literal:
            text += item.literal
            continue
        if text:
            yield text, start == 0, False
        text, start = "", index + 1
    if text:
        yield text, start == 0, True


def _features(node: Node) -> Iterator[_Feature]:
    for text, is_first, is_last in _runs(node):
        parts = text.split("/")
        for index, part in enumerate(parts):
            # Without a `/` beside it, a part is bounded only at the beginning or the end of the path.
            is_bounded_left = index > 0 or is_first
            is_bounded_right = index < len(parts) - 1 or is_last
            if is_bounded_left and is_bounded_right:
                yield _Where.SEGMENT, part
            elif is_bounded_right and part:
                yield _Where.TAIL, part[-_SIZE:]
            elif is_bounded_left and part:
                yield _Where.HEAD, part[:_SIZE]
        size = min(_SIZE, len(text))
        yield from ((_Where.PIECE, text[i : i + size]) for i in range(len(text) - size + 1))


_Drawer = dict[str, dict[str, Pattern]]
"""Patterns by key, by the text of the feature that they are filed under."""


class PatternIndex:
    r"""Finds which of many patterns match a path, trying only those that share literal text with it.

    Example:
        >>> index = PatternIndex()
        >>> for key in (r"layer/\d+/query", r".*/7/.*", r"head"):
        ...     index.add(key, Pattern(key))
        >>> index.matching("layer/7/query")
        ('layer/\\d+/query', '.*/7/.*')
    """

    def __init__(self) -> None:
        self._filed: dict[str, tuple[int, Pattern, _Feature | None]] = {}
        self._drawers: dict[tuple[_Where, int], _Drawer] = {}
        self._unfiled: dict[str, Pattern] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._filed)

    def add(self, key: str, pattern: Pattern) -> None:
        """Adds `pattern` under `key`, after those already there; a key that is there already is moved."""
        self.discard(key)
        # Among features that as few patterns share, a longer one says more about a path.
        feature = min(pattern.features, key=lambda f: (self._crowd(f), -len(f[1])), default=None)
        self._num_added += 1
        self._filed[key] = self._num_added, pattern, feature
        if feature is None:
            self._unfiled[key] = pattern
        else:
            self._drawers.setdefault(_place(feature), {}).setdefault(feature[1], {})[key] = pattern

    def discard(self, key: str) -> None:
        """Takes the pattern of `key` out, if there is one."""
        _, _, feature = self._filed.pop(key, (0, None, None))
        if feature is None:
            self._unfiled.pop(key, None)
            return
        drawer = self._drawers[_place(feature)]
        del drawer[feature[1]][key]
        if not drawer[feature[1]]:
            del drawer[feature[1]]
        if not drawer:
            del self._drawers[_place(feature)]

    def matching(self, path: str) -> tuple[str, ...]:
        """Returns the keys of all patterns that match the whole of `path`, in the order in which they were added.

        Raises:
            PolicyError: the path is longer than `MAX_PATH_LENGTH`, or a pattern could take too long on it; see
                `Pattern.matches`.
        """
        _check(path)
        found = [key for key, pattern in self._unfiled.items() if pattern._matches(path)]
        segments = set(path.split("/"))
        for (where, size), drawer in self._drawers.items():
            for text in _texts(path, segments, where, size):
                filed = drawer.get(text)
                if filed is not None:
                    found += [key for key, pattern in filed.items() if pattern._matches(path)]
        if len(found) > 1:
            found.sort(key=lambda key: self._filed[key][0])
        return tuple(found)

    def _crowd(self, feature: _Feature) -> int:
        """How many patterns are filed under a feature; of pieces more, since every path must be cut up to find them."""
        drawer = self._drawers.get(_place(feature), {})
        return len(drawer.get(feature[1], ())) + (_CROWDED if feature[0] is _Where.PIECE else 0)


def _place(feature: _Feature) -> tuple[_Where, int]:
    where, text = feature
    return where, 0 if where is _Where.SEGMENT else len(text)


def _texts(path: str, segments: set[str], where: _Where, size: int) -> set[str]:
    """The features of one kind and size that a path has."""
    if where is _Where.SEGMENT:
        return segments
    if where is _Where.TAIL:
        return {segment[-size:] for segment in segments}
    if where is _Where.HEAD:
        return {segment[:size] for segment in segments}
    return {path[i : i + size] for i in range(len(path) - size + 1)}
