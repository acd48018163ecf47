"""Keras-style layers on PyTorch; see `narrowcast.torch.layers`. PyTorch is imported with the first name that is used.

Example:
    >>> from narrowcast import layers
    >>> layers.Dense(10, dtype="mixed_float16").dtype_policy
    <DTypePolicy "mixed_float16">
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.torch.layers import (
        Activation,
        BatchNormalization,
        Conv1D,
        Conv2D,
        Dense,
        Dropout,
        EinsumDense,
        Embedding,
        GroupedQueryAttention,
        Layer,
        LayerNormalization,
        MultiHeadAttention,
        ReversibleEmbedding,
        RMSNormalization,
        Sequential,
        Softmax,
        TransformerBlock,
        initializers,
        regularizers,
    )

__all__ = [
    "Activation",
    "BatchNormalization",
    "Conv1D",
    "Conv2D",
    "Dense",
    "Dropout",
    "EinsumDense",
    "Embedding",
    "GroupedQueryAttention",
    "Layer",
    "LayerNormalization",
    "MultiHeadAttention",
    "RMSNormalization",
    "ReversibleEmbedding",
    "Sequential",
    "Softmax",
    "TransformerBlock",
    "initializers",
    "regularizers",
]

_MODULES = ("initializers", "regularizers")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'narrowcast.layers' has no attribute {name!r}; it has {', '.join(__all__)}")
    layers = importlib.import_module("narrowcast.torch.layers")
    return importlib.import_module(f"narrowcast.torch.layers.{name}") if name in _MODULES else getattr(layers, name)


def __dir__() -> list[str]:
    return list(__all__)
