"""Keras models as records, from a live model or from a file; their policies and weights alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast import dtype_policies
from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, registry
from narrowcast.errors import ModelError
from narrowcast.keras.files import read_file
from narrowcast.keras.records import KerasLayer, KerasModel, attribute_path
from narrowcast.keras.variables import floats_of

__all__ = ["children_of", "is_keras", "policies_of", "policy_of", "read", "walk", "weights_of"]


def read(source: Any) -> KerasModel:
    """Reads a Keras 3 model or layer, or a `.keras` file.

    Args:
        source: a live model or layer of Keras, on any of its backends, or the path of a file. A file is read without
            Keras; it says less: layers that a layer of an unknown class holds have the policies of that class.

    Raises:
        ModelError: it is neither.
        CheckpointError: the file cannot be read.

    Example:
        >>> import keras
        >>> [layer.path for layer in read(keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5)])).layers]
        ['', '0', '1']
    """
    if isinstance(source, str | Path):
        return read_file(Path(source))
    if not is_keras(source):
        raise ModelError(
            "Model is not one of Keras", got={"type": type(source)}, expected="a model or layer of Keras 3, or a file"
        )
    return KerasModel(tuple(_record(path, layer) for path, layer in walk(source)))


def policies_of(source: Any) -> DTypePolicyMap:
    """Returns the policies of all layers of a Keras model, or of a `.keras` file, as a map.

    Its default is the policy of the model; every layer with another one has an exact key, by the paths of
    `narrowcast.keras.KerasLayer`. `narrowcast.apply` takes it for a model of the same structure.

    Example:
        >>> import keras
        >>> policies_of(keras.Sequential([keras.layers.Dense(2, dtype="bfloat16")])).get("0")
        <DTypePolicy "bfloat16">
    """
    return read(source).policies


def weights_of(source: Any) -> dict[str, dict[str, Any]]:
    """Returns the variables of a Keras model, or of a `.keras` file, by path and name, as NumPy arrays of floats.

    Quantized ones are those that their codes stand for. `narrowcast.saving.load_keras_weights` takes them.
    """
    return {layer.path: dict(layer.variables) for layer in read(source).layers if layer.variables}


def is_keras(model: object) -> bool:
    """Says whether an object is a layer or model of Keras, which is not imported for it."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Layer)


def walk(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields every layer of a live model with its path, each once, the root first."""
    seen = {id(model)}
    pending = [("", model)]
    while pending:
        path, layer = pending.pop(0)
        yield path, layer
        below = []
        for name, child in children_of(layer):
            if id(child) not in seen:
                seen.add(id(child))
                below.append((f"{path}/{name}" if path else name, child))
        pending = below + pending


def children_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the layers that a layer of Keras holds, by the names that paths have for them."""
    keras = sys.modules["keras"]
    if isinstance(layer, keras.Sequential):
        yield from ((str(number), child) for number, child in enumerate(layer.layers))
        return
    if isinstance(layer, keras.Model) and type(layer).__name__ == "Functional":
        yield from ((child.name, child) for child in layer.layers if type(child).__name__ != "InputLayer")
        return
    attributes = {**vars(layer), **vars(layer).get("_modules", {})}
    for attribute, value in attributes.items():
        if attribute in ("_layers", "_modules", "_tracker"):
            continue
        name = attribute_path(type(layer).__name__, attribute)
        yield from _held(name, value, keras.Layer)


def _held(name: str, value: Any, layer_class: type) -> Iterator[tuple[str, Any]]:
    if isinstance(value, layer_class):
        yield name, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _held(f"{name}/{number}", item, layer_class)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _held(f"{name}/{key}", item, layer_class)


def policy_of(layer: Any) -> DTypePolicy:
    """Returns the policy of a live layer of Keras, as ours; of a map, what it gives this layer."""
    keras = sys.modules["keras"]
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path] if layer.path else policy.default_policy
    return dtype_policies.deserialize(keras.dtype_policies.serialize(policy))


def _record(path: str, layer: Any) -> KerasLayer:
    stored = {}
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        stored[str(variable.name)] = _to_numpy(variable)
    policy = policy_of(layer)
    class_name = type(layer).__name__
    mode = policy.quantization_mode or ""
    is_coded = any(value.dtype == np.int8 for value in stored.values())
    is_quantized = is_coded or registry.mode_of(policy).is_trainable  # whose variables stay floats
    floats = floats_of(class_name, mode if is_quantized else "", stored, getattr(layer, "equation", None))
    return KerasLayer(path, class_name, policy, floats, stored, layer.path or "")


def _to_numpy(variable: Any) -> Any:
    value = variable.value
    if hasattr(value, "detach"):  # PyTorch
        value = value.detach().cpu()
        return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
    value = np.asarray(value)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value
