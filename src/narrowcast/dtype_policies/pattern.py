"""One compiled key of a map, and an index that finds the patterns matching a path among thousands.

The index goes by literal text. Every match of `.*/7/(attn|mlp)/.*_proj` holds the segment `7` and the text `_proj`; of
all such features of a pattern, the one that the fewest other patterns share decides where it is filed. A path looks up
its own segments and short pieces and tries only what is filed there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from narrowcast.dtype_policies.expression import Characters, Concatenation, Node, parse
from narrowcast.dtype_policies.runaway import RunawayError, count_steps
from narrowcast.errors import PatternError, PolicyError

__all__ = ["MAX_KEY_LENGTH", "MAX_PATH_LENGTH", "Pattern", "PatternIndex"]

MAX_KEY_LENGTH = 1024
"""The longest key that a map takes, in characters."""
MAX_PATH_LENGTH = 1024
"""The longest path that is looked up, in characters."""
_PIECE = 3  # characters; shorter pieces are shared by too many paths, longer ones need longer literals


@dataclass(frozen=True, slots=True)
class _Compiled:
    expression: re.Pattern[str]
    segments: tuple[str, ...]
    literals: tuple[str, ...]
    longest: str
    is_for_one_line: bool


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
    def segments(self) -> tuple[str, ...]:
        """Whole parts of a path, between two `/`, that every match holds."""
        return self._compiled.segments

    @property
    def literals(self) -> tuple[str, ...]:
        """Literal texts that every match holds, longest first."""
        return self._compiled.literals

    def matches(self, path: str) -> bool:
        """Says whether the pattern matches the whole of `path`.

        Raises:
            PolicyError: the path is longer than `MAX_PATH_LENGTH`, or holds a line feed with which this pattern could
                take too long.
        """
        _check(path)
        return self._matches(path)

    def _matches(self, path: str) -> bool:
        compiled = self._compiled
        if compiled.longest not in path:
            return False
        if compiled.is_for_one_line and "\n" in path:
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
            fix="Escape characters that are meant literally with a backslash, or use `re.escape`",
        ) from None
    try:
        node = parse(key)
        is_for_one_line = _check_runaway(node)
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
    literals = sorted({text for text, _, _ in _runs(node)}, key=lambda text: (-len(text), text))
    longest = literals[0] if literals else ""
    return _Compiled(expression, tuple(_segments(node)), tuple(literals), longest, is_for_one_line)


def _check_runaway(node: Node) -> bool:
    """Whether the pattern is bounded on paths of one line only; raises `RunawayError` if it is not even there."""
    try:
        count_steps(node, MAX_PATH_LENGTH, is_one_line=False)
    except RunawayError:
        count_steps(node, MAX_PATH_LENGTH, is_one_line=True)
        return True
    return False


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


def _segments(node: Node) -> Iterator[str]:
    for text, is_first, is_last in _runs(node):
        parts = text.split("/")
        # Without a `/` beside it, a part is whole only at the beginning or the end of the path.
        yield from (
            part for index, part in enumerate(parts) if (index > 0 or is_first) and (index < len(parts) - 1 or is_last)
        )


_Feature = tuple[str, bool]
"""A text, and whether it is a whole segment of a path rather than any piece of it."""


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
        self._segments: dict[str, dict[str, Pattern]] = {}
        self._pieces: dict[int, dict[str, dict[str, Pattern]]] = {}
        self._unfiled: dict[str, Pattern] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._filed)

    def add(self, key: str, pattern: Pattern) -> None:
        """Adds `pattern` under `key`, after those already there; a key that is there already is moved."""
        self.discard(key)
        feature = self._rarest(pattern)
        self._num_added += 1
        self._filed[key] = self._num_added, pattern, feature
        if feature is None:
            self._unfiled[key] = pattern
        else:
            self._drawer(feature).setdefault(feature[0], {})[key] = pattern

    def discard(self, key: str) -> None:
        """Takes the pattern of `key` out, if there is one."""
        if key not in self._filed:
            return
        _, _, feature = self._filed.pop(key)
        if feature is None:
            del self._unfiled[key]
            return
        drawer = self._drawer(feature)
        del drawer[feature[0]][key]
        if not drawer[feature[0]]:
            del drawer[feature[0]]
            if not drawer and not feature[1]:
                del self._pieces[len(feature[0])]

    def matching(self, path: str) -> tuple[str, ...]:
        """Returns the keys of all patterns that match the whole of `path`, in the order in which they were added.

        Raises:
            PolicyError: the path is longer than `MAX_PATH_LENGTH`.
        """
        _check(path)
        found = [key for key, pattern in self._unfiled.items() if pattern._matches(path)]
        segments = self._segments
        if segments:
            for part in set(path.split("/")):
                if part in segments:
                    found += [key for key, pattern in segments[part].items() if pattern._matches(path)]
        for size, pieces in self._pieces.items():
            for piece in {path[i : i + size] for i in range(len(path) - size + 1)}:
                if piece in pieces:
                    found += [key for key, pattern in pieces[piece].items() if pattern._matches(path)]
        if len(found) > 1:
            found.sort(key=lambda key: self._filed[key][0])
        return tuple(found)

    def _drawer(self, feature: _Feature) -> dict[str, dict[str, Pattern]]:
        text, is_segment = feature
        return self._segments if is_segment else self._pieces.setdefault(len(text), {})

    def _rarest(self, pattern: Pattern) -> _Feature | None:
        """The feature of a pattern that the fewest patterns are filed under; whole segments come first among equals."""
        features: list[_Feature] = [(segment, True) for segment in pattern.segments]
        for literal in pattern.literals:
            size = min(_PIECE, len(literal))
            features += [(literal[i : i + size], False) for i in range(len(literal) - size + 1)]
        num_filed = {text_kind: len(self._drawer_of(text_kind)) for text_kind in features}
        # Among equals, longer text says more about a path.
        return min(features, key=lambda f: (num_filed[f], not f[1], -len(f[0])), default=None)

    def _drawer_of(self, feature: _Feature) -> dict[str, Pattern]:
        text, is_segment = feature
        drawer = self._segments if is_segment else self._pieces.get(len(text), {})
        return drawer.get(text, {})
