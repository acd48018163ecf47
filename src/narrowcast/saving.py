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
    "register_keras_serializable",
    "register_serializable",
    "serialize",
    "serialize_keras_object",
]

custom_object_scope = CustomObjectScope
register_keras_serializable = register_serializable
serialize_keras_object = serialize
deserialize_keras_object = deserialize
