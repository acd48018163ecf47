"""The grammar of policy names: ``<mode>_from_<source>``, and the numbers that a mode carries in its name.

A mode is written as words and numbers joined by `/`: ``int8``, ``float8/current``, ``gptq/4/128``. Parsing and
formatting are inverses: what `format` writes, `parse` reads, and there is one spelling for each value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.errors import PolicyError, PolicyTypeError

__all__ = ["Choice", "Grammar", "Setting", "join_name", "split_name"]

_SEPARATOR = "_from_"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Setting:
    """An integer that a mode is set by, such as a group size.

    Args:
        name: what it is called in configs, attributes and errors.
        expected: the values it may have, in words.
        default: its value where none is given; `None` where one must be.
        minimum: the smallest value.
        choices: the only values, where they are few.
        special: values that are allowed besides, below the minimum.
        maximum: the largest value.
    """

    name: str
    expected: str
    default: int | None = None
    minimum: int = 1
    choices: tuple[int, ...] = ()
    special: tuple[int, ...] = ()
    maximum: int = 2**31 - 1

    def check(self, value: Any, *, mode: str) -> int:
        """Returns `value` as a plain integer; errors name the mode it is set for.

        Raises:
            PolicyTypeError: it is not an integer, or a bool.
            PolicyError: it is not one of the values allowed.
        """
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise PolicyTypeError(
                f"Setting {self.name} is not an integer",
                got={"mode": mode, self.name: value},
                expected=self.expected,
            )
        if number in self.special or (
            number in self.choices if self.choices else self.minimum <= number <= self.maximum
        ):
            return number
        raise PolicyError(
            f"Setting {self.name} is out of range", got={"mode": mode, self.name: number}, expected=self.expected
        )

    def parse(self, text: str, *, mode: str) -> int:
        """Returns the value that `text` spells; raises `PolicyError` for other spellings (`0128`, `+1`, `1_28`)."""
        if not _INTEGER.fullmatch(text):
            raise PolicyError(
                f"Setting {self.name} is not written as a number",
                got={"mode": mode, self.name: text},
                expected=self.expected,
            )
        return self.check(int(text), mode=mode)


@dataclass(frozen=True)
class Choice:
    """A setting of a mode that has one of a few values: words, or yes and no. Never part of a name.

    Args:
        name: what it is called in configs, attributes and errors.
        choices: the values.
        default: its value where none is given.

    Example:
        >>> Choice("amax_compute_algo", ("max", "most_recent"), "max").check("newest", mode="float8")
        Traceback (most recent call last):
            ...
        narrowcast.errors.PolicyError: Setting amax_compute_algo is unknown. Got mode='float8', \
amax_compute_algo='newest'. Expected 'max' or 'most_recent'.
    """

    name: str
    choices: tuple[str | bool, ...]
    default: str | bool

    @property
    def expected(self) -> str:
        """The values it may have, in words."""
        return " or ".join(repr(choice) for choice in self.choices)

    def check(self, value: Any, *, mode: str) -> str | bool:
        """Returns `value`; errors name the mode it is set for.

        Raises:
            PolicyTypeError: it is not of the type of the values: 1 is no bool.
            PolicyError: it is not one of the values.
        """
        wanted = type(self.default)
        if type(value) is not wanted:
            raise PolicyTypeError(
                f"Setting {self.name} is not {'a bool' if wanted is bool else 'text'}",
                got={"mode": mode, self.name: value},
                expected=self.expected,
            )
        for choice in self.choices:
            if choice == value:
                return choice
        raise PolicyError(
            f"Setting {self.name} is unknown", got={"mode": mode, self.name: value}, expected=self.expected
        )


@dataclass(frozen=True)
class Grammar:
    """How a mode is written: its name and then its numbers, joined by `/`.

    Args:
        head: the name of the mode; may itself hold a `/` (`float8/current`).
        numbers: what follows, in order.

    Example:
        >>> grammar = Grammar("awq", (Setting("weight_bits", "4", choices=(4,)), Setting("group_size", "1 or more")))
        >>> print(grammar)
        awq/<weight_bits>/<group_size>
        >>> grammar.parse("awq/4/128")
        {'weight_bits': 4, 'group_size': 128}
        >>> grammar.format({"weight_bits": 4, "group_size": 128})
        'awq/4/128'
    """

    head: str
    numbers: tuple[Setting, ...] = ()

    def __str__(self) -> str:
        return "/".join([self.head, *(f"<{number.name}>" for number in self.numbers)])

    def fits(self, text: str) -> bool:
        """Says whether `text` is this mode's name and as many parts as it has numbers."""
        parts, head = text.split("/"), self.head.split("/")
        return parts[: len(head)] == head and len(parts) == len(head) + len(self.numbers)

    def parse(self, text: str) -> dict[str, int]:
        """Returns the numbers in `text`, which fits, by name.

        Raises:
            PolicyError: a number is not spelled as one, or not allowed.
        """
        parts = text[len(self.head) :].split("/")[1:]
        return {number.name: number.parse(part, mode=text) for number, part in zip(self.numbers, parts, strict=True)}

    def format(self, values: Mapping[str, int]) -> str:
        """Writes the mode with the numbers in `values`, which may hold more."""
        return "/".join([self.head, *(str(values[number.name]) for number in self.numbers)])


def split_name(name: str) -> tuple[str, str | None]:
    """Splits a policy's name into mode and source; the source is `None` where the name has none.

    Example:
        >>> split_name("int8_from_mixed_bfloat16"), split_name("float32")
        (('int8', 'mixed_bfloat16'), ('float32', None))
    """
    mode, separator, source = name.partition(_SEPARATOR)
    return mode, source if separator else None


def join_name(mode: str, source: str) -> str:
    """Joins a mode and a source's name into the name of a quantized policy; the inverse of `split_name`."""
    return f"{mode}{_SEPARATOR}{source}"
