r"""What a key which matches nothing may have meant: paths, or itself in the syntax that a map reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from narrowcast.dtype_policies.pattern import USUAL_PATH_LENGTH, Pattern
from narrowcast.errors import PatternError

__all__ = ["meant", "nearest_paths"]

_NUMBER = re.compile(r"\d+")
_SYNTAX = re.compile(r"\(\?[^)]*\)|\\d\+?|\[[^\]]*\][*+?]?|\.[*+?]|\\(.)|[()^$?*+{}]")
_MIN_RATIO, _MAX_BEHIND = 0.6, 0.1  # of difflib; below the first, texts only look alike to it
_STAR = re.compile(r"(?<![.)\]}\\dwsS])\*")  # what would be a repeat of one literal character: a shell's star
_MAX_SHAPES = 5_000  # comparing texts is quadratic in their length; more shapes than this are cut


def meant(key: str, paths: Sequence[str], *, num_results: int = 3) -> list[str]:
    r"""Returns what `key`, which matches nothing, may have meant, best first: keys or paths.

    Read with dots for slashes, with a shell's `*` for any text, or without the name of a parameter at its end, a key
    may match after all, and is returned in the form in which it does. Otherwise it is the nearest paths.

    Example:
        >>> paths = ["", "encoder", "encoder/fc1", "encoder/fc2"]
        >>> meant("encoder.fc1", paths), meant("*/fc*", paths), meant("encoder/fc1/weight", paths), meant("fc1", paths)
        (['encoder/fc1'], ['.*/fc.*'], ['encoder/fc1'], ['.*/fc1'])
    """
    slashed = re.sub(r"(?<!\\)\.(?![*+?{])", "/", key).replace("\\/", "/")
    shapes = _shapes(paths)
    for form in (slashed, *(base.rpartition("/")[0] for base in (key, slashed))):
        starred = _STAR.sub(".*", form)
        for found in (form, starred, f".*/{form}", f".*/{starred}"):
            if form and found != key and (found in paths or _matches_any(found, shapes.values())):
                return [found]
    return _nearest(key, shapes, num_results)


def _matches_any(key: str, paths: Iterable[str]) -> bool:
    try:
        pattern = Pattern(key)
    except PatternError:
        return False
    return any(path and len(path) <= USUAL_PATH_LENGTH and pattern.matches(path) for path in paths)


def _shapes(paths: Iterable[str]) -> dict[str, str]:
    """Paths with every number 0, and the first path of each of these."""
    shapes: dict[str, str] = {}
    for path in paths:
        shapes.setdefault(_NUMBER.sub("0", path), path)
        if len(shapes) >= _MAX_SHAPES:
            break
    return shapes


def nearest_paths(key: str, paths: Iterable[str], *, num_results: int = 3) -> list[str]:
    r"""Returns the paths that look most like `key`, best first; none where nothing is near.

    Args:
        key: an exact path or a regular expression. Of the latter, what is not literal is read as a number or nothing.
        paths: the paths of a model. Those that differ only in their numbers are compared once.
        num_results: the most paths to return.

    Example:
        >>> nearest_paths(r"encoder/layers/\d+/query", ["encoder", "encoder/layer/0/query", "encoder/layer/1/query"])
        ['encoder/layer/0/query']
    """
    return _nearest(key, _shapes(paths), num_results)


def _nearest(key: str, shapes: dict[str, str], num_results: int) -> list[str]:
    text = _SYNTAX.sub(lambda found: "0" if found[0].startswith("\\d") else found[1] or "", key)
    wanted = _NUMBER.sub("0", text)
    found = _closest(wanted, shapes, num_results)
    if not found:
        # The part after the last slash is what authors know best: compare that alone.
        last = wanted.rpartition("/")[2]
        by_last: dict[str, str] = {}
        for shape in shapes:
            by_last.setdefault(shape.rpartition("/")[2], shape)
        found = [by_last[name] for name in _closest(last, by_last, num_results)]
    return [shapes[shape] for shape in found]


def _closest(text: str, candidates: Iterable[str], num_results: int) -> list[str]:
    """The candidates that are near, and nearly as near as the nearest."""
    near = difflib.get_close_matches(text, list(candidates), n=num_results, cutoff=_MIN_RATIO)
    ratios = [difflib.SequenceMatcher(None, candidate, text).ratio() for candidate in near]
    return [candidate for candidate, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - _MAX_BEHIND]
