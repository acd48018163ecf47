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
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'narrowcast.layers' has no attribute {name!r}")
    return getattr(importlib.import_module("narrowcast.torch.layers"), name)


def __dir__() -> list[str]:
    return list(__all__)
