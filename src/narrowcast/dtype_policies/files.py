r"""Policy files: a map as TOML, written by hand, or as its JSON twin, which is what narrowcast writes.

The two forms hold the same fields::

    narrowcast = 1                                   # the version of the format
    default = "keep"
    [rules]
    'encoder/layer/\d+/.*' = "int8"                  # regular expressions in single quotes
    "pooler/dense" = { mode = "float8", source = "mixed_bfloat16", amax_history_length = 16 }
    [optional]                                       # may match nothing
    '.*/lm_head' = "keep"

A policy is its name, or the name of a mode alone, or a table: `mode`, and where they are needed `source` and the
settings of the mode. `{ dtype = "int8" }` is the policy that stores `int8`, whose name alone would be the mode.
"""

from __future__ import annotations

import json
import os
import re
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.dtype_policies import registry
from narrowcast.dtype_policies.map import DTypePolicyMap
from narrowcast.dtype_policies.policy import DTypePolicy
from narrowcast.errors import NarrowcastError, PolicyError, PolicyFileError, closest

__all__ = ["FORMAT_VERSION", "dumps", "loads", "read", "write"]

FORMAT_VERSION = 1
"""The version of the format that is written, and the newest that is read."""

_FIELDS = ("narrowcast", "default", "rules", "optional")
_TOML_PLACE = re.compile(r" \(at (line (?P<line>\d+), column \d+|end of document)\)$")
_UNWRITABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that stand in no key: no path has them, and `"\\b"` in double quotes becomes one."""


def read(path: str | os.PathLike[str]) -> DTypePolicyMap:
    """Reads a policy file.

    Args:
        path: a file whose name ends in `.toml` or `.json`.

    Raises:
        PolicyFileError: the file is not a policy file; the text says in which line, where that is known.
        OSError: the file cannot be read.
    """
    path = Path(path)
    file_format = path.suffix.lower().removeprefix(".")
    if file_format not in _PARSERS:
        raise PolicyFileError(
            "Policy file is of no known form", got={"path": str(path)}, expected="a .toml or .json file"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PolicyFileError(f"{path.name} is not text: {error}", expected="a text file in UTF-8") from None
    return loads(text, file_format, name=path.name)


def write(policies: DTypePolicyMap, path: str | os.PathLike[str]) -> None:
    """Writes a map as a JSON policy file; a file of this name is replaced at once or stays as it was.

    Raises:
        PolicyError: the name does not end in `.json`, or the map holds what no file can say, see `dumps`.
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        raise PolicyError(
            "Policy files are written as JSON", got={"path": str(path)}, expected="a name ending in .json"
        )
    text = dumps(policies)
    staged = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        staged.write_text(text, encoding="utf-8", newline="\n")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def loads(text: str, file_format: str = "toml", *, name: str = "policy file") -> DTypePolicyMap:
    r"""Reads the text of a policy file.

    Args:
        text: the text.
        file_format: `toml` or `json`.
        name: what errors call it.

    Raises:
        PolicyFileError: the text is not a policy file.

    Example:
        >>> loads("narrowcast = 1\n[rules]\n'encoder/.*' = 'int8'")["encoder/query"]
        <QuantizedDTypePolicy "int8_from_keep">
    """
    source = _Text(text, name)
    try:
        fields = _PARSERS[file_format](source)
    except RecursionError:
        raise source.error("Tables are nested too deeply") from None
    return _map_from(fields, source)


def dumps(policies: DTypePolicyMap) -> str:
    """Returns a map as the text of a JSON policy file, from which `loads` makes an equal map.

    Raises:
        PolicyError: a policy is of a class that is not narrowcast's, or a key has control characters.

    Example:
        >>> print(dumps(DTypePolicyMap("keep", {"encoder/.*": "int8"})))
        {
          "narrowcast": 1,
          "default": "keep",
          "rules": {
            "encoder/.*": "int8_from_keep"
          }
        }
        <BLANKLINE>
    """
    fields: dict[str, Any] = {"narrowcast": FORMAT_VERSION}
    if policies.has_default:
        fields["default"] = _entry(policies.default_policy)
    optional = policies.optional
    rules = {key: _entry(policy) for key, policy in policies.items()}
    for key in rules:
        if _UNWRITABLE.search(key):
            raise PolicyError("Key has control characters", got={"key": key}, expected="a key that a file can hold")
    fields["rules"] = {key: entry for key, entry in rules.items() if key not in optional}
    if optional:
        fields["optional"] = {key: entry for key, entry in rules.items() if key in optional}
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a file, and errors that say where in it something is wrong."""

    text: str
    name: str

    def error(self, problem: str, *, at: str | int | None = None, **parts: Any) -> PolicyFileError:
        """Makes an error that begins with the file's name and the line `at`: its number, or a key in it."""
        line = self._line_of(at) if isinstance(at, str) else at
        place = self.name if line is None else f"{self.name}, line {line}"
        return PolicyFileError(f"{place}: {problem}", **parts)

    def passed_on(self, error: NarrowcastError, *, at: str) -> PolicyFileError:
        """Makes an error of this file from one about a value in it."""
        return self.error(
            error.problem, at=at, got=error.got, expected=error.expected, suggestion=error.suggestion, fix=error.fix
        )

    def _line_of(self, key: str) -> int | None:
        spellings = (f"'{key}'", json.dumps(key), json.dumps(key, ensure_ascii=False))
        bare = re.compile(rf"\s*{re.escape(key)}\s*[=.\]]")
        for number, line in enumerate(self.text.splitlines(), 1):
            if bare.match(line) or any(spelling in line for spelling in spellings):
                return number
        return None


def _parse_toml(source: _Text) -> Any:
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        lines = source.text.splitlines()
        place = _TOML_PLACE.search(str(error))
        line = int(place["line"] or len(lines)) if place else None
        fix = ""
        if line and line <= len(lines) and re.search(r'"[^"]*\\', lines[line - 1]):
            fix = "Write regular expressions in single quotes, where a backslash is a backslash"
        elif "overwrite" in str(error):
            fix = "Write each key once"
        raise source.error(f"Text is not TOML: {_TOML_PLACE.sub('', str(error))}", at=line, fix=fix) from None


def _parse_json(source: _Text) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise source.error(f"Key {key!r} stands twice in one table", at=key)
            table[key] = value
        return table

    try:
        return json.loads(source.text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        fix = "Write a backslash in JSON twice" if "escape" in error.msg else ""
        raise source.error(f"Text is not JSON: {error.msg}", at=error.lineno, fix=fix) from None
    except ValueError as error:  # a number of thousands of digits
        raise source.error(f"Text is not JSON that can be read: {error}") from None


_PARSERS: dict[str, Callable[[_Text], Any]] = {"toml": _parse_toml, "json": _parse_json}


def _map_from(fields: Any, source: _Text) -> DTypePolicyMap:
    if not isinstance(fields, dict):
        raise source.error("File holds no table", got={"type": type(fields).__name__}, expected=f"{', '.join(_FIELDS)}")
    _check_version(fields, source)
    for field in fields:
        if field not in _FIELDS:
            near = closest(field, _FIELDS)
            raise source.error(
                f"Field {field!r} is unknown",
                at=field,
                expected=f"one of {', '.join(_FIELDS)}",
                suggestion=near[0] if near else None,
                fix="Rules stand under [rules]",
            )
    tables = {field: fields.get(field, {}) for field in ("rules", "optional")}
    for field, table in tables.items():
        if not isinstance(table, dict):
            raise source.error(
                f"Field {field!r} is not a table", at=field, got={field: table}, expected="keys and policies"
            )
    policies = DTypePolicyMap(_policy(fields["default"], source, "default") if "default" in fields else None)
    for field, table in tables.items():
        for key, value in table.items():
            if _UNWRITABLE.search(key):
                raise source.error(
                    "Key has control characters: a backslash in double quotes begins an escape",
                    got={"key": key},
                    expected="a path or a regular expression",
                    fix="Write regular expressions in single quotes (TOML), or each backslash twice (JSON)",
                )
            if key in policies:
                raise source.error(f"Key {key!r} stands in rules and in optional", at=key, expected="one place")
            policy = _policy(value, source, key)
            try:
                policies[key] = policy
            except NarrowcastError as error:
                raise source.passed_on(error, at=key) from error
            if field == "optional":
                policies.mark_optional(key)
    return policies


def _check_version(fields: Mapping[str, Any], source: _Text) -> None:
    version = fields.get("narrowcast")
    if type(version) is not int or version < 1:
        raise source.error(
            "Format version is missing" if version is None else "Format version is not a version",
            at=None if version is None else "narrowcast",
            got={"narrowcast": version},
            expected=f"a number from 1 to {FORMAT_VERSION}",
            fix=f"Begin the file with narrowcast = {FORMAT_VERSION}",
        )
    if version > FORMAT_VERSION:
        raise source.error(
            "Format version is newer than this narrowcast",
            at="narrowcast",
            got={"narrowcast": version},
            expected=f"at most {FORMAT_VERSION}",
            fix="Update narrowcast",
        )


def _policy(value: Any, source: _Text, key: str) -> DTypePolicy:
    try:
        return _read_entry(value)
    except NarrowcastError as error:
        raise source.passed_on(error, at=key) from error


def _read_entry(value: Any) -> DTypePolicy:
    """Reads one policy as it stands in a file."""
    if isinstance(value, str):
        return registry.asked(value)
    if not isinstance(value, dict):
        raise PolicyError("Policy is neither text nor a table", got={"policy": value}, expected="a name, or a table")
    fields = dict(value)
    dtype, mode = fields.pop("dtype", None), fields.pop("mode", None)
    if isinstance(dtype, str) and mode is None and not fields:
        return DTypePolicy(dtype)
    if isinstance(mode, str) and dtype is None:
        return registry.make(mode, fields.pop("source", "keep"), **fields)
    raise PolicyError(
        "Policy table says no policy",
        got={"policy": value},
        expected="mode, with source and the mode's settings where they are needed; or dtype alone",
        fix="Write a key that holds dots in quotes"
        if all(isinstance(item, (dict, str)) for item in fields.values())
        else "",
    )


def _entry(policy: DTypePolicy) -> Any:
    """Writes one policy as `_read_entry` reads it."""
    config = policy.get_config()
    table = {"mode": config.pop("mode", None), "source": config.pop("source_name", None), **config}
    for entry in (policy.name, {"dtype": policy.name}, table):
        try:
            if _read_entry(entry) == policy:
                return entry
        except NarrowcastError:
            continue
    raise PolicyError(
        "Policy is of a class that policy files do not know",
        got={"policy": policy},
        expected="one of narrowcast's own policies",
    )
