"""Every exception of narrowcast, in one tree.

Each class inherits `NarrowcastError` and the built-in that is nearest in meaning, so that code written for Keras
(`except ValueError`) keeps working::

    NarrowcastError
    ├── PolicyError (ValueError)              a policy's name, mode or setting
    │   ├── PatternError                      a key of a map: not a regular expression, runaway, too long
    │   ├── DuplicateRuleError                assigning a key that a map already has
    │   ├── OverlapError                      two patterns of a map give one path different policies
    │   └── PolicyFileError                   a policy file: version, field, type, syntax
    ├── PolicyTypeError (TypeError)           a value of the wrong type where a policy or dtype belongs
    ├── MissingRuleError (KeyError)           a key that is not in the map
    ├── PathError (KeyError)                  a path that is not in the model
    ├── ModelError (ValueError)               a model (or its address) that cannot be read as a tree
    ├── PlanError (ValueError)                what a map asks of a model does not hold; carries every finding
    ├── UnsupportedError (NotImplementedError) a mode or layer that this version cannot carry out
    ├── WeightError (ValueError)              values that a policy cannot hold: NaN, infinity, too large
    ├── LossScaleError (ValueError)           a loss scaler's settings, or its calls in the wrong order
    ├── LayerError (ValueError)               a layer's arguments, shapes or state do not allow what is asked
    ├── ConfigError (ValueError)              a config, or a class to be saved by name, that cannot be used
    └── CheckpointError (ValueError)          a saved model: corrupt, incomplete, of a newer format
        └── TreeMismatchError                 a saved model whose layers are not those of the model given
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DuplicateRuleError",
    "LayerError",
    "LossScaleError",
    "MissingRuleError",
    "ModelError",
    "NarrowcastError",
    "OverlapError",
    "PathError",
    "PatternError",
    "PlanError",
    "PolicyError",
    "PolicyFileError",
    "PolicyTypeError",
    "TreeMismatchError",
    "UnsupportedError",
    "WeightError",
    "closest",
]


def closest(name: str, candidates: Iterable[str], *, num_results: int = 1) -> list[str]:
    """Returns the candidates that look most like `name`, best first (none where nothing is near).

    Example:
        >>> closest("mixed_float61", ["float32", "mixed_float16"])
        ['mixed_float16']
    """
    import difflib  # only where there is an error to word

    known = list(candidates)
    short = _SHORT_NAMES.get(name.lower())
    return [short] if short in known else difflib.get_close_matches(name, known, n=num_results, cutoff=0.6)


_SHORT_NAMES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8/delayed": "float8",
    "float8/tensorwise": "float8/current",
    "mixed_float8": "float8",
    "w8a8": "int8",
    "w8a16": "int8/weight",
}
"""What dtypes and modes are often called, and their names here."""


class NarrowcastError(Exception):
    """The base of every exception that narrowcast raises on purpose.

    The text is put together from parts, which stay readable as attributes:
    ``<problem>. Got <name>=<repr>. Expected <expected>; did you mean <suggestion>? <fix>.``

    Args:
        problem: what is wrong, with its subject; no full stop at the end.
        got: the offending values by name, shown with `repr`.
        expected: the rule or the list that the value had to meet.
        suggestion: the nearest thing that would have been right, if any.
        fix: one action that mends it.

    Example:
        >>> print(PolicyError("Policy name is unknown", got={"name": "flaot32"}, expected="a dtype name",
        ...                   suggestion="float32", fix="Correct the name"))
        Policy name is unknown. Got name='flaot32'. Expected a dtype name; did you mean 'float32'? Correct the name.
    """

    def __init__(
        self,
        problem: str,
        *,
        got: Mapping[str, Any] | None = None,
        expected: str = "",
        suggestion: str | None = None,
        fix: str = "",
    ) -> None:
        self.problem = problem
        self.got = dict(got or {})
        self.expected = expected
        self.suggestion = suggestion
        self.fix = fix
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.problem + "."]
        if self.got:
            parts.append("Got " + ", ".join(f"{name}={_short(value)}" for name, value in self.got.items()) + ".")
        if self.expected or self.suggestion is not None:
            expected = f"Expected {self.expected}" if self.expected else ""
            hint = f"did you mean {self.suggestion!r}?" if self.suggestion is not None else ""
            if expected and hint:
                parts.append(f"{expected}; {hint}")
            else:
                parts.append(expected + "." if expected else hint[0].upper() + hint[1:])
        if self.fix:
            parts.append(self.fix + ".")
        return " ".join(parts)

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; every class here shows the sentence.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[NarrowcastError], args: tuple[Any, ...], state: dict[str, Any]) -> NarrowcastError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class PolicyError(NarrowcastError, ValueError):
    """A policy's name, mode or setting is not one that exists."""


class PatternError(PolicyError):
    """A key of a map is not a usable pattern: invalid, able to backtrack without end, or too long."""


class DuplicateRuleError(PolicyError):
    """A key that a map already has was assigned again; `DTypePolicyMap.replace` replaces."""


class OverlapError(PolicyError):
    """Two patterns of a map match one path and give it different policies."""


class PolicyFileError(PolicyError):
    """A policy file cannot be read: syntax, format version, unknown field or wrong type."""


class PolicyTypeError(NarrowcastError, TypeError):
    """A value of the wrong type stands where a policy, a dtype or a key belongs."""


class MissingRuleError(NarrowcastError, KeyError):
    """A key is not one of a map's."""


class PathError(NarrowcastError, KeyError):
    """A path is not the path of any site of the model."""


class ModelError(NarrowcastError, ValueError):
    """A model, or the address of one, cannot be read as a tree of sites."""


class PlanError(NarrowcastError, ValueError):
    """What a map asks of a model does not hold; `findings` has every finding, not only the first.

    Args:
        problem: the summary.
        findings: one sentence a finding.
        fix: what to do.
    """

    def __init__(self, problem: str, *, findings: Iterable[str] = (), fix: str = "") -> None:
        self.findings = tuple(findings)
        super().__init__(problem, fix=fix)

    def _text(self) -> str:
        lines = [self.problem + (":" if self.findings else ".")]
        lines += [f"  - {finding}" for finding in self.findings]
        if self.fix:
            lines.append(self.fix + ".")
        return "\n".join(lines)


class UnsupportedError(NarrowcastError, NotImplementedError):
    """A mode, a layer or an environment that this version cannot carry out."""


class WeightError(NarrowcastError, ValueError):
    """A weight holds NaN or infinity, so no scale can be computed from it."""


class LayerError(NarrowcastError, ValueError):
    """An argument, a shape or the state of a layer does not allow what is asked of it."""


class ConfigError(NarrowcastError, ValueError):
    """A config is not one of an object that can be made again, or a class cannot be saved by name."""


class LossScaleError(NarrowcastError, ValueError):
    """A loss scaler has a setting that cannot work, or is called in the wrong order."""


class CheckpointError(NarrowcastError, ValueError):
    """A saved model cannot be read: missing, corrupt, incomplete, or of a newer format."""


class TreeMismatchError(CheckpointError):
    """A saved model's layers are not those of the model given; `differences` lists them by path.

    Args:
        problem: the summary.
        differences: one sentence a difference.
        fix: what to do.
    """

    def __init__(self, problem: str, *, differences: Iterable[str] = (), fix: str = "") -> None:
        self.differences = tuple(differences)
        super().__init__(problem, fix=fix)

    def _text(self) -> str:
        lines = [self.problem + (":" if self.differences else ".")]
        shown = self.differences[:20]
        lines += [f"  - {difference}" for difference in shown]
        if len(self.differences) > len(shown):
            lines.append(f"  - and {len(self.differences) - len(shown)} more")
        if self.fix:
            lines.append(self.fix + ".")
        return "\n".join(lines)
