"""Layers that differ only in the numbers of their paths, folded into one: `layer/{0..5}/query`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product
from typing import TypeVar

__all__ = ["fold", "fold_paths"]

_NUMBER = re.compile(r"\d+")

Item = TypeVar("Item")


def fold(items: Iterable[Item], *, path: Callable[[Item], str], alike: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Groups items that are alike and whose paths differ only in their numbers, where these are every combination.

    Args:
        items: the items, in order.
        path: gives the path of an item.
        alike: gives what items of one group have in common.

    Returns:
        The groups, each in the order of the items, and in the order of their first items.

    Example:
        >>> fold(["layer/0/a", "head", "layer/1/a"], path=str, alike=len)
        [['layer/0/a', 'layer/1/a'], ['head']]
    """
    groups: dict[tuple[str, Hashable], list[tuple[int, Item]]] = {}
    for number, item in enumerate(items):
        groups.setdefault((_NUMBER.sub("#", path(item)), alike(item)), []).append((number, item))
    folded: list[list[tuple[int, Item]]] = []
    for group in groups.values():
        if len(group) == 1 or len(fold_paths([path(item) for _, item in group])) == 1:
            folded.append(group)
        else:
            folded += [[numbered] for numbered in group]
    folded.sort(key=lambda group: group[0][0])
    return [[item for _, item in group] for group in folded]


def fold_paths(paths: Sequence[str]) -> list[str]:
    """Returns one path that stands for all, or the paths as they are where their numbers are not every combination.

    Example:
        >>> fold_paths(["layer/0/query", "layer/1/query", "layer/2/query", "layer/4/query"])
        ['layer/{0..2,4}/query']
        >>> fold_paths(["layer/0/expert/1", "layer/1/expert/0"])
        ['layer/0/expert/1', 'layer/1/expert/0']
    """
    numbers = [tuple(map(int, _NUMBER.findall(path))) for path in paths]
    texts = _NUMBER.split(paths[0])
    places = [sorted(set(values)) for values in zip(*numbers, strict=True)]
    if set(numbers) != set(product(*places)) or len(numbers) != len(set(numbers)):
        return list(paths)
    braces = [str(values[0]) if len(values) == 1 else "{" + _ranges(values) + "}" for values in places]
    return ["".join(text + brace for text, brace in zip(texts, [*braces, ""], strict=True))]


def _ranges(values: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
