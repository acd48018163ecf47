"""A Keras model as plain records: its layers by path, their policies, and their variables as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap
from narrowcast.errors import PathError, closest
from narrowcast.plan.table import Column, Table

__all__ = ["ATTENTION", "KerasLayer", "KerasModel", "attribute_path"]

ATTENTION = {
    "query_dense": "query",
    "key_dense": "key",
    "value_dense": "value",
    "gate_dense": "gate",
    "output_dense": "attention_output",
}
"""The attributes of Keras' attention layers that hold layers, and the names these layers have."""


def attribute_path(class_name: str, attribute: str) -> str:
    """Returns the name of a child in a path, from the attribute of its parent that holds it."""
    name = attribute.lstrip("_")
    return ATTENTION.get(name, name) if class_name.endswith("Attention") else name


@dataclass(frozen=True)
class KerasLayer:
    """One layer.

    Args:
        path: attributes from the root, joined by `/`. Layers of a `Sequential` go by their numbers, those of a
            functional model by their names, projections of attention by `query`, `key`, `value`, `attention_output`.
        class_name: the name of its class.
        policy: its policy; `None` where the source does not say.
        variables: its own variables by name, in Keras' layout, as floats where they are quantized.
        stored: the same as they are stored: codes, scales, histories.
        keras_path: the path that Keras has for it, of names.
    """

    path: str
    class_name: str
    policy: DTypePolicy | None = None
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    stored: Mapping[str, Any] = field(default_factory=dict, repr=False)
    keras_path: str = ""


@dataclass(frozen=True)
class KerasModel:
    """A model.

    Args:
        layers: all layers, the root first.
    """

    layers: tuple[KerasLayer, ...]

    @cached_property
    def _by_path(self) -> Mapping[str, KerasLayer]:
        return {layer.path: layer for layer in self.layers}

    def __getitem__(self, path: str) -> KerasLayer:
        """Returns the layer at a path.

        Raises:
            PathError: there is none; the nearest is suggested.
        """
        if path not in self._by_path:
            near = closest(path, self._by_path)
            raise PathError(
                f"Path {path!r} is not in the Keras model",
                expected="the attribute path of a layer, joined by '/'",
                suggestion=near[0] if near else None,
            )
        return self._by_path[path]

    def __iter__(self) -> Iterator[KerasLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Returns the layers that have variables as a table: path, class, policy, shapes."""
        rows = tuple(
            (
                layer.path,
                layer.class_name or "?",
                "?" if layer.policy is None else str(layer.policy.name),
                ", ".join(
                    f"{name} {'×'.join(map(str, array.shape)) or 'scalar'}" for name, array in layer.variables.items()
                ),
            )
            for layer in self.layers
            if layer.variables
        )
        return Table((Column("path"), Column("class"), Column("policy"), Column("variables")), rows).to_text()

    @property
    def policies(self) -> DTypePolicyMap:
        """The policies of all layers as a map: that of the root as its default, every other layer by its path."""
        rules = {layer.path: layer.policy for layer in self.layers[1:] if layer.policy is not None}
        default = self.layers[0].policy
        return DTypePolicyMap(default, {path: policy for path, policy in rules.items() if policy != default})
