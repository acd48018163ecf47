"""One compiled key of a map, and an index that finds the patterns matching a path among thousands."""

from __future__ import annotations

import re

from narrowcast.errors import PatternError, PolicyError

__all__ = ["MAX_KEY_LENGTH", "MAX_PATH_LENGTH", "Pattern", "PatternIndex"]

MAX_KEY_LENGTH = 1024
"""The longest key that a map takes, in characters."""
MAX_PATH_LENGTH = 1024
"""The longest path that is looked up, in characters."""


class Pattern:
    """A key read as a regular expression that must match a whole path.

    Args:
        key: a regular expression of Python's `re`.

    Raises:
        PatternError: the key is no regular expression, is longer than `MAX_KEY_LENGTH`, or can backtrack without end.

    Example:
        >>> Pattern(r"encoder/layer/\\d+/.*").matches("encoder/layer/3/query")
        True
    """

    __slots__ = ("_fullmatch", "key")

    def __init__(self, key: str) -> None:
        if len(key) > MAX_KEY_LENGTH:
            raise PatternError(
                "Key is too long", got={"length": len(key)}, expected=f"at most {MAX_KEY_LENGTH} characters"
            )
        try:
            self._fullmatch = re.compile(key).fullmatch
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"Key is not a regular expression: {error}", got={"key": key}) from None
        self.key = key

    def matches(self, path: str) -> bool:
        """Says whether the pattern matches the whole of `path`."""
        return self._fullmatch(path) is not None


class PatternIndex:
    """Finds which of many patterns match a path."""

    def __init__(self) -> None:
        self._patterns: dict[str, Pattern] = {}

    def add(self, key: str, pattern: Pattern) -> None:
        """Adds `pattern` under `key`, after those already there."""
        self._patterns[key] = pattern

    def discard(self, key: str) -> None:
        """Takes the pattern of `key` out, if there is one."""
        self._patterns.pop(key, None)

    def matching(self, path: str) -> tuple[str, ...]:
        """Returns the keys of all patterns that match the whole of `path`, in the order in which they were added."""
        if len(path) > MAX_PATH_LENGTH:
            raise PolicyError(
                "Path is too long", got={"length": len(path)}, expected=f"at most {MAX_PATH_LENGTH} characters"
            )
        return tuple(key for key, pattern in self._patterns.items() if pattern.matches(path))
