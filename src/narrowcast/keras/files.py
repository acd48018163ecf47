"""`.keras` files: a zip of a config and an HDF5 file of variables. Read without Keras, and nothing in them is run."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast import dtype_policies
from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap
from narrowcast.errors import CheckpointError, NarrowcastError, UnsupportedError
from narrowcast.keras.records import KerasLayer, KerasModel, attribute_path
from narrowcast.keras.variables import ORDERS, floats_of, mode_of_arrays, named, spelled

__all__ = ["read_file"]

_MOST_BYTES_IN_ONE = 1_000
"""A file's variables may take at most so many times its own bytes: more is no model."""

_OF_LISTS = frozenset({"Sequential", "Functional", "Model"})
_OTHER_NAMES = {"GroupQueryAttention": "GroupedQueryAttention"}
"""Classes that a config calls by another name than the file of variables."""


def read_file(path: Path) -> KerasModel:
    """Reads a `.keras` file.

    Raises:
        CheckpointError: it is not one, or it is corrupt.
        UnsupportedError: h5py, which reads the variables, is not installed.
    """
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError("Reading a .keras file needs h5py", fix="Install it: pip install h5py") from error
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
            content = archive.read("model.weights.h5")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"File {str(path)!r} is no .keras file, or it is corrupt: {error}",
            expected="what `model.save('name.keras')` of Keras 3 writes",
        ) from error
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            return KerasModel(tuple(_Reader(h5py, len(content)).layers(file, config)))
    except NarrowcastError:
        raise
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"File {str(path)!r} is corrupt: {type(error).__name__}: {error}") from error


class _Reader:
    def __init__(self, h5py: Any, num_bytes: int) -> None:
        self._h5py = h5py
        self._bytes_left = max(num_bytes, 4096) * _MOST_BYTES_IN_ONE

    def layers(self, group: Any, config: Mapping[str, Any]) -> Iterator[KerasLayer]:
        """Yields the layers of a model, the root first."""
        policy = _policy(config) or DTypePolicy("float32")
        yield from self._layer(group, config, "", "", policy)

    def _layer(
        self, group: Any, config: Mapping[str, Any], path: str, keras_path: str, above: DTypePolicy | None
    ) -> Iterator[KerasLayer]:
        given = _policy(config) or above
        policy = _looked_up(given, keras_path)
        arrays = self._arrays(group)
        class_name = str(config.get("class_name") or _guessed(group, keras_path, arrays))
        fields = config.get("config", {}) if isinstance(config.get("config"), Mapping) else {}
        says_mode = class_name in ORDERS and _policy(config) is not None and policy is not None
        mode = (policy.quantization_mode or "") if says_mode and policy is not None else ""
        if not mode:
            mode = mode_of_arrays(class_name, arrays)
        stored = named(class_name, arrays, mode, fields)
        if mode and policy is not None and policy.quantization_mode is None:
            # The layer was quantized after it was made by the one above, whose config does not say so.
            policy = dtype_policies.get(f"{spelled(mode, stored)}_from_{policy.name}")
        floats = floats_of(class_name, mode, stored, fields.get("equation"))
        yield KerasLayer(path, class_name, policy, floats, stored, keras_path)
        for name, keras_name, child, inner in self._children(group, class_name, fields):
            yield from self._layer(
                child, inner, f"{path}/{name}" if path else name, _joined(keras_path, keras_name), given
            )

    def _children(
        self, group: Any, class_name: str, fields: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, Any, Mapping[str, Any]]]:
        """The layers below, as name in the path, name in Keras, group and config."""
        for attribute in self._subgroups(group):
            child = self._open(group, attribute)
            if attribute == "layers" and class_name in _OF_LISTS:
                # A container made by a layer has no config of its own.
                yield from self._listed(child, class_name, fields) if fields else self._held(child, "")
            elif "vars" in child:
                is_projection = class_name.endswith("Attention") and attribute.endswith("_dense")
                inner = {"class_name": "EinsumDense" if is_projection else ""}
                yield attribute_path(class_name, attribute), _name(child, attribute), child, inner
            else:
                yield from self._held(child, attribute.lstrip("_"))

    def _listed(
        self, group: Any, class_name: str, fields: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, Any, Mapping[str, Any]]]:
        used: dict[str, int] = {}
        named: set[str] = set()
        number = 0
        for config in fields.get("layers", ()):
            is_input = config.get("class_name") == "InputLayer"
            if is_input and class_name == "Sequential":
                continue
            class_name_there = str(config.get("class_name"))
            base = _snake_case(_OTHER_NAMES.get(class_name_there, class_name_there))
            count = used[base] = used.get(base, -1) + 1
            key = f"{base}_{count}" if count else base
            name = str(config.get("config", {}).get("name", key))
            if key in group:
                named.add(key)
                if not is_input:
                    yield str(number) if class_name == "Sequential" else name, name, self._open(group, key), config
            number += 1
        if further := [key for key in self._subgroups(group) if key not in named and self._holds_arrays(group[key])]:
            raise CheckpointError(
                "File holds variables of layers that its config does not name",
                got={"groups": further},
                expected="a layer in the config for each",
            )

    def _holds_arrays(self, group: Any) -> bool:
        pending = [group]
        while pending:
            inner = pending.pop()
            for name in inner:
                child = self._open(inner, name)
                if isinstance(child, self._h5py.Dataset):
                    return True
                pending.append(child)
        return False

    def _held(self, group: Any, path: str) -> Iterator[tuple[str, str, Any, Mapping[str, Any]]]:
        """Layers in a list: numbered where all are of one class, else by the names in the file."""
        names = list(self._subgroups(group))
        bases = {re.sub(r"_\d+$", "", name) for name in names}
        ordered = sorted(names, key=lambda name: int((re.findall(r"_(\d+)$", name) or ["0"])[0]))
        for number, name in enumerate(ordered):
            key = str(number) if len(bases) == 1 else name
            child = self._open(group, name)
            inner = {"class_name": _BY_SNAKE.get(re.sub(r"_\d+$", "", name), "")}
            yield _joined(path, key), _name(child, name), child, inner

    def _subgroups(self, group: Any) -> Iterator[str]:
        yield from (n for n in group if n != "vars" and isinstance(self._open(group, n), self._h5py.Group))

    def _open(self, group: Any, name: str) -> Any:
        # A link could lead to another file of this machine.
        if not isinstance(group.get(name, getlink=True), self._h5py.HardLink):
            raise CheckpointError(f"File of variables has a link at {name!r}", expected="groups and arrays only")
        return group[name]

    def _arrays(self, group: Any) -> list[Any]:
        if "vars" not in group:
            return []
        variables = self._open(group, "vars")
        found = []
        for number in range(len(variables)):
            array = self._open(variables, str(number)) if str(number) in variables else None
            if not isinstance(array, self._h5py.Dataset) or array.external:
                raise CheckpointError("Variables of a layer are not numbered arrays", got={"names": list(variables)})
            self._bytes_left -= array.nbytes
            if self._bytes_left < 0:
                raise CheckpointError(
                    "File of variables declares far more values than it can hold", got={"shape": array.shape}
                )
            value = array[()]
            if array.attrs.get("dtype") == "bfloat16":
                value = (np.asarray(value).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            found.append(np.asarray(value))
        return found


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _policy(config: Mapping[str, Any]) -> DTypePolicy | None:
    """The policy that a layer's config says, as ours."""
    fields = config.get("config")
    given = fields.get("dtype") if isinstance(fields, Mapping) else None
    return None if given is None else dtype_policies.deserialize(given)


def _looked_up(policy: DTypePolicy | None, keras_path: str) -> DTypePolicy | None:
    """The policy of one layer: a map is asked by the path that Keras has, with and without the model's name."""
    if not isinstance(policy, DTypePolicyMap):
        return policy
    for key in policy:
        if key == keras_path or key.endswith(f"/{keras_path}") or keras_path.endswith(f"/{key}"):
            return policy[key]
    return policy[keras_path]


def _name(group: Any, key: str) -> str:
    name = group["vars"].attrs.get("name", key) if "vars" in group else key
    return str(name)


def _snake_case(name: str) -> str:
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


_BY_SNAKE = {_snake_case(name): name for name in (*ORDERS, "MultiHeadAttention", "GroupedQueryAttention", "Sequential")}


def _guessed(group: Any, keras_path: str, arrays: list[Any]) -> str:
    """The class of a layer that no config names, from what it holds and from the name that Keras gave it."""
    if {"query_dense", "key_dense", "value_dense"} <= set(group):
        return "MultiHeadAttention"
    by_name = _BY_SNAKE.get(re.sub(r"_\d+$", "", keras_path.rpartition("/")[2]), "")
    if by_name in ORDERS or (by_name == "Sequential" and "layers" in group):
        return by_name
    is_kernel = bool(arrays) and arrays[0].ndim > 1 and (arrays[0].dtype == np.int8 or len(arrays) > 2)
    return "EinsumDense" if is_kernel else ""
