"""`narrowcast.json`: the author's map and the resolved plan, beside the tensors.

The file is JSON with one format version. A reader refuses a newer version and says so, and never guesses at fields
that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowcast import dtype_policies
from narrowcast.checkpoint.staging import locate
from narrowcast.dtype_policies import DTypePolicyMap
from narrowcast.errors import CheckpointError, NarrowcastError
from narrowcast.plan.plan import Plan

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest"]

FORMAT_VERSION = 1
MANIFEST_NAME = "narrowcast.json"

_FIELDS = {"narrowcast", "framework", "map", "plan", "files", "aliases"}
_OPTIONAL = {"architecture"}


@dataclass(frozen=True)
class Manifest:
    """What a saved model says of itself.

    Args:
        framework: the framework that wrote it.
        map: the author's map, as it was given.
        plan: the resolved plan.
        files: the CRC-32 of each file of tensors, by name.
        aliases: for each further name of a shared tensor, the name under which it is stored.
        architecture: what the framework makes the model again from, as plain JSON values, or `None`.
    """

    framework: str
    map: DTypePolicyMap
    plan: Plan
    files: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    architecture: Mapping[str, Any] | None = None

    def write(self, folder: Path) -> None:
        """Writes the manifest into `folder`."""
        content = {
            "narrowcast": FORMAT_VERSION,
            "framework": self.framework,
            "map": dtype_policies.serialize(self.map),
            "plan": self.plan.to_json(),
            "files": dict(self.files),
            "aliases": dict(self.aliases),
        }
        if self.architecture is not None:
            content["architecture"] = dict(self.architecture)
        # A line for each field: legible in a review, and written by the encoder in C, which indents nothing.
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
        (folder / MANIFEST_NAME).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a saved folder.

        Raises:
            CheckpointError: there is none, it is not valid, or its format is newer than this version reads.
        """
        path = locate(folder, MANIFEST_NAME)
        if not path.exists():
            raise CheckpointError(
                f"Folder {str(folder)!r} holds no model saved by narrowcast",
                expected=f"a file {MANIFEST_NAME!r}",
                fix="Give the folder that `narrowcast.save` wrote",
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        except (ValueError, OSError, RecursionError) as error:
            raise _invalid(f"it is not JSON ({error})") from error
        version = content.get("narrowcast") if isinstance(content, dict) else None
        if type(version) is not int or version < 1:
            raise _invalid("it has no format version")
        if content["narrowcast"] > FORMAT_VERSION:
            raise CheckpointError(
                "Saved model was written by a newer narrowcast",
                got={"format": content["narrowcast"]},
                expected=f"format {FORMAT_VERSION} or older",
                fix="Upgrade narrowcast",
            )
        if strange := sorted((set(content) - _OPTIONAL) ^ _FIELDS):
            raise _invalid(f"field {strange[0]!r} is {'unknown' if strange[0] in content else 'missing'}")
        for name in ("files", "aliases", *(_OPTIONAL & set(content))):
            if not isinstance(content[name], dict):
                raise _invalid(f"field {name!r} is not a table")
        if not all(type(value) is int for value in content["files"].values()):
            raise _invalid("field 'files' does not hold checksums")
        if not all(isinstance(value, str) for value in content["aliases"].values()):
            raise _invalid("field 'aliases' does not hold names")
        try:
            policy = dtype_policies.deserialize(content["map"])
            plan = Plan.from_json(content["plan"])
        except NarrowcastError as error:
            raise _invalid(str(error)) from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise _invalid(f"{type(error).__name__}: {error}") from error
        if json.loads(json.dumps(plan.to_json())) != content["plan"]:
            # What was read says something else, or less, than what was written.
            raise _invalid("field 'plan' is not a plan as narrowcast writes it")
        if not isinstance(policy, DTypePolicyMap):
            raise _invalid("field 'map' is not a map")
        architecture = content.get("architecture")
        return cls(content["framework"], policy, plan, content["files"], content["aliases"], architecture)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two entries of one name would be read differently by different readers."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name stands twice in one table")
    return table


def _invalid(why: str) -> CheckpointError:
    return CheckpointError(f"{MANIFEST_NAME!r} of the saved model is not valid: {why}", fix="Save the model again")
