"""Names for classes and functions that a saved model refers to, and objects as plain values; under Keras' names too.

`narrowcast.save` and `narrowcast.load` write and read models.

Example:
    >>> import narrowcast
    >>> @narrowcast.saving.register_keras_serializable("MyPackage")
    ... class Penalty:
    ...     def __init__(self, factor):
    ...         self.factor = factor
    ...     def get_config(self):
    ...         return {"factor": self.factor}
    ...     @classmethod
    ...     def from_config(cls, config):
    ...         return cls(**config)
    >>> config = narrowcast.saving.serialize(Penalty(2))
    >>> narrowcast.saving.deserialize(config).factor
    2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.serialization import (
    CustomObjectScope,
    deserialize,
    get_custom_objects,
    get_registered_name,
    get_registered_object,
    register_serializable,
    serialize,
)

__all__ = [
    "CustomObjectScope",
    "custom_object_scope",
    "deserialize",
    "deserialize_keras_object",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "load_keras_weights",
    "register_keras_serializable",
    "register_serializable",
    "serialize",
    "serialize_keras_object",
]

custom_object_scope = CustomObjectScope
register_keras_serializable = register_serializable
serialize_keras_object = serialize
deserialize_keras_object = deserialize


def load_keras_weights(
    model: Any, source: Any, *, rename: Mapping[str, str] | Callable[[str], str] | None = None
) -> Any:
    """Gives a built model of narrowcast's layers the weights of a Keras model, and returns it: all of them or none.

    Args:
        model: a model of `narrowcast.layers` whose layers are those of the Keras model.
        source: a live model of Keras 3, the path of a `.keras` file, or what `narrowcast.keras.weights_of` returned.
            Weights of int8, int4 and float8 come as the floats that they stand for; quantizing them again to int8
            gives the same codes.
        rename: where paths differ: a table from the beginnings of paths there to those here, or a function. Paths
            there are those of `narrowcast.keras.KerasLayer`.

    Raises:
        TreeMismatchError: the layers or their variables are not the same; lists all differences.
        CheckpointError: the file cannot be read.

    Example:
        >>> import os; os.environ["KERAS_BACKEND"] = "torch"
        >>> import keras, torch
        >>> from narrowcast import layers
        >>> theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
        >>> ours = layers.Sequential([layers.Dense(2)])
        >>> ours.build((None, 4))
        >>> load_keras_weights(ours, theirs)(torch.ones(1, 4)).tolist()
        [[4.0, 4.0]]
    """
    from narrowcast.keras import weights_of
    from narrowcast.torch.layers import foreign

    foreign.load(model, source if isinstance(source, Mapping) else weights_of(source), rename)
    return model
