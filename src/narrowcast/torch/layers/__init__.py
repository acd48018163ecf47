"""Keras-style layers on PyTorch: modules with a `dtype`, built when shapes are known, saved with their architecture.

A layer has no arithmetic of its own for any mode. It holds the module of PyTorch that computes, and its policy is
carried out on that by the schemes that `narrowcast.apply` uses.
"""

from narrowcast.torch.layers.activation import Activation, Softmax
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.batch_normalization import BatchNormalization
from narrowcast.torch.layers.containers import Sequential
from narrowcast.torch.layers.convolution import Conv1D, Conv2D
from narrowcast.torch.layers.dense import Dense
from narrowcast.torch.layers.dropout import Dropout
from narrowcast.torch.layers.einsum_dense import EinsumDense
from narrowcast.torch.layers.embedding import Embedding, ReversibleEmbedding
from narrowcast.torch.layers.grouped_query_attention import GroupedQueryAttention
from narrowcast.torch.layers.multi_head_attention import MultiHeadAttention
from narrowcast.torch.layers.normalization import LayerNormalization, RMSNormalization
from narrowcast.torch.layers.transformer_block import TransformerBlock

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
