"""Tensors in and out of safetensors files, sharded with an index where they are large.

Names and layout are those that others read: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
`model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowcast.checkpoint.staging import locate
from narrowcast.errors import CheckpointError

__all__ = ["INDEX_NAME", "OWNED", "SINGLE_NAME", "read_tensors", "write_tensors"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OWNED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""Matches every file name that `write_tensors` can write."""

_FRAMEWORK = {"torch": "pt", "jax": "flax", "numpy": "np"}


def write_tensors(
    tensors: Mapping[str, Any], folder: Path, *, framework: str, max_shard_bytes: int, metadata: Mapping[str, str]
) -> dict[str, int]:
    """Writes tensors to `folder`, in the order given.

    Args:
        tensors: contiguous tensors of one framework by name; no two share memory.
        folder: where the files go; exists.
        framework: `torch`, `jax` or `numpy`.
        max_shard_bytes: the most bytes a file holds, unless one tensor alone is larger.
        metadata: text for the header of each file.

    Returns:
        The CRC-32 of each file written, by file name.
    """
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    save_file = _module(framework).save_file
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        try:
            save_file(shard, folder / name, metadata=dict(metadata))
        except Exception as error:
            # safetensors reports a full disk as its own error class; the caller speaks of OSErrors.
            if "No space left" in str(error) or "os error" in str(error).lower() or "I/O error" in str(error):
                raise OSError(str(error)) from error
            raise
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return {name: crc32(folder / name) for name in names}


def read_tensors(
    folder: Path, *, framework: str, checksums: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields `(name, tensor)` of every tensor saved in `folder`, one at a time, each in memory of its own.

    Args:
        folder: the saved folder.
        framework: the framework whose tensors are wanted: `torch`, `jax` or `numpy`.
        checksums: the CRC-32 each file must have, by file name; the files must be exactly these.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or an index is wrong.
    """
    from safetensors import SafetensorError, safe_open

    weight_map = _weight_map(folder)
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    if checksums is not None and set(names) != set(checksums):
        raise CheckpointError(
            f"Saved model in {str(folder)!r} does not have the files it was written with",
            got={"files": names},
            expected=", ".join(sorted(checksums)),
            fix="Save the model again, or copy all of its files",
        )
    paths = {name: locate(folder, name) for name in names}
    for name, path in paths.items():
        if not path.exists():
            raise CheckpointError(
                f"File {name!r} is missing from the saved model in {str(folder)!r}",
                expected=f"{len(names)} file{'s' if len(names) > 1 else ''} of tensors",
                fix="Copy the whole folder, or save the model again",
            )
    for name, path in paths.items():
        try:
            handle = safe_open(path, framework=_FRAMEWORK[framework])
        except (SafetensorError, OSError, ValueError) as error:
            raise _corrupt(name, str(error)) from error
        # After the header: a truncated file is named as that.
        if checksums is not None and crc32(path) != checksums[name]:
            raise _corrupt(name, "its bytes are not those that were written")
        with handle as file:
            keys = file.keys()
            if weight_map is not None:
                expected = {key for key, file_name in weight_map.items() if file_name == name}
                if expected != set(keys):
                    strange = sorted(expected ^ set(keys))
                    raise _corrupt(name, f"the index and the file disagree about {strange[0]!r}")
            for key in keys:
                try:
                    tensor = file.get_tensor(key)
                except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                    raise _corrupt(name, str(error)) from error
                # The tensor lies in the mapped file; a copy does not change when the file does.
                yield key, tensor.clone() if framework == "torch" else tensor


def crc32(path: Path) -> int:
    """Returns the CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _weight_map(folder: Path) -> dict[str, str] | None:
    path = locate(folder, INDEX_NAME)
    if not path.exists():
        return None
    # A single file beside a stale index: the file that the commit wrote last counts, and a commit removes the other.
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise TypeError("weight_map is not a table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(INDEX_NAME, str(error)) from error
    return weight_map


def _corrupt(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"File {name!r} of the saved model is truncated or corrupt: {why}",
        fix="Copy the file again, or save the model again",
    )


def _module(framework: str) -> Any:
    if framework == "torch":
        import safetensors.torch as module
    elif framework == "jax":
        import safetensors.flax as module
    else:
        import safetensors.numpy as module
    return module
