"""What a call came to, in words that are the same for Keras' classes and ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # read by keras when it is imported, so tests import it from here

import keras

__all__ = ["describe", "keras", "outcome"]

_ERRORS = (TypeError, KeyError, AttributeError, NotImplementedError, ValueError)
_SETTINGS = ("amax_history_length", "block_size", "weight_bits", "group_size")


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Returns ("returned", description) or ("raised", built-in class)."""
    try:
        return "returned", describe(call())
    except Exception as error:
        for built_in in _ERRORS:
            if isinstance(error, built_in):
                return "raised", built_in.__name__
        return "raised", type(error).__name__


def describe(value: Any) -> Any:
    """Returns everything that can be seen of a value, with no object of either library in it."""
    if hasattr(value, "policy_map") or type(value).__name__ == "DTypePolicyMap":
        return {
            "class": "DTypePolicyMap",
            "default": describe(value.default_policy),
            "rules": [(key, describe(policy)) for key, policy in value.items()],
            "name": value.name,
            "dtypes": (value.compute_dtype, value.variable_dtype, value.quantization_mode),
        }
    if hasattr(value, "compute_dtype"):
        return {
            "class": type(value).__name__,
            "repr": repr(value),
            "name": value.name,
            "dtypes": (value.compute_dtype, value.variable_dtype, value.quantization_mode),
            "settings": {name: getattr(value, name) for name in _SETTINGS if hasattr(value, name)},
        }
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value
