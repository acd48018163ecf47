"""`MultiHeadAttention`: several heads, each with keys and values of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers.activation import Softmax
from narrowcast.torch.layers.attending import (
    projection_equation,
)
from narrowcast.torch.layers.attention import Attention
from narrowcast.torch.layers.configs import positive
from narrowcast.torch.layers.dropout import Dropout
from narrowcast.torch.layers.einsum_dense import EinsumDense

__all__ = ["MultiHeadAttention"]


@builtin()
class MultiHeadAttention(Attention):
    """Attention of `query` to `key` and `value` by several heads.

    Each is projected for every head; the outputs of all heads are projected back. Masks are bools, True for what is
    attended to; they are selected by, never added. A step that attends to nothing gets zeros.

    Args:
        num_heads: the number of heads.
        key_dim: the size of a head for queries and keys.
        value_dim: the size of a head for values; `key_dim` by default.
        dropout: the share of attention that is dropped in training.
        use_bias: whether projections have a bias.
        output_shape: the length, or lengths, of the last axes of the output; that of the query by default.
        attention_axes: the axes that are attended over; by default all but the batch and the last.
        sliding_window: how far each step attends to either side, counting itself; `None` for any distance.
        flash_attention: not supported; PyTorch chooses.
        kernel_initializer: for the kernels of projections.
        bias_initializer: for their biases.
        kernel_regularizer: a penalty on their kernels.
        bias_regularizer: a penalty on their biases.
        activity_regularizer: a penalty on their outputs.
        kernel_constraint: not supported.
        bias_constraint: not supported.
        use_gate: whether the outputs of the heads are multiplied by a sigmoid of another projection of the query.
        seed: for dropout.
        kwargs: those of `Layer`. A map as `dtype` names `query`, `key`, `value`, `gate`, `attention_output`,
            `softmax`, `dropout_layer`.

    Numerics:
        Shares are computed in float32. Where the CPU multiplies the compute dtype slowly, products are too, and the
        result is rounded.

    Example:
        >>> import torch
        >>> layer = MultiHeadAttention(2, 8)
        >>> x = torch.randn(1, 5, 16)
        >>> layer(x, x, use_causal_mask=True).shape, layer.query.path
        (torch.Size([1, 5, 16]), 'query')
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | Sequence[int] | None = None,
        attention_axes: int | Sequence[int] | None = None,
        sliding_window: int | None = None,
        flash_attention: Any = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        use_gate: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._take_common(
            dropout=dropout,
            use_bias=use_bias,
            sliding_window=sliding_window,
            flash_attention=flash_attention,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            use_gate=use_gate,
            seed=seed,
        )
        self.num_heads, self.key_dim = positive("num_heads", num_heads), positive("key_dim", key_dim)
        self.value_dim = positive("value_dim", value_dim, optional=True) or key_dim
        given = (output_shape,) if isinstance(output_shape, int) else output_shape
        self._output_shape = tuple(positive("output_shape", length) for length in given) if given else None
        axes = (attention_axes,) if isinstance(attention_axes, int) else attention_axes
        self.attention_axes = tuple(axes) if axes else None

    def build(self, query_shape: Any, value_shape: Any = None, key_shape: Any = None) -> None:
        """Makes the projections; the value has the shape of the query, and the key that of the value, by default."""
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        if value_shape[1:-1] != key_shape[1:-1]:
            raise LayerError(
                f"Value and key of MultiHeadAttention at {self.path!r} have different lengths",
                got={"value_shape": value_shape, "key_shape": key_shape},
                expected="the same axes but the last",
            )
        self.query = self._project(query_shape, self.key_dim)
        self.key = self._project(key_shape, self.key_dim)
        if self.use_gate:
            self.gate = self._project(query_shape, self.value_dim, activation="sigmoid")
        self.value = self._project(value_shape, self.value_dim)
        rank = len(query_shape) + 1
        axes = tuple(range(1, rank - 2)) if self.attention_axes is None else self.attention_axes
        self._attention_axes = tuple(axis if axis >= 0 else rank - 1 + axis for axis in axes)
        num_last = len(self._attention_axes)
        self.softmax = Softmax(axis=list(range(-num_last, 0)))
        self.dropout_layer = Dropout(self.dropout, seed=self.seed)
        lengths = self._output_shape or (query_shape[-1],)
        equation, new = projection_equation(len(query_shape) - 1, 2, len(lengths))
        open_axes = [None] * (len(query_shape) - 2)
        self.attention_output = self._projection(equation, [*open_axes, *lengths], new)
        for layer, shape in ((self.query, query_shape), (self.key, key_shape), (self.value, value_shape)):
            layer.build(shape)
        if self.use_gate:
            self.gate.build(query_shape)
        self.softmax.build()
        self.dropout_layer.build()
        self.attention_output.build((*query_shape[:-1], self.num_heads, self.value_dim))

    def _project(self, shape: Any, size: int, **kwargs: Any) -> EinsumDense:
        equation, new = projection_equation(len(shape) - 1, 1, 2)
        return self._projection(equation, [*[None] * (len(shape) - 2), self.num_heads, size], new, **kwargs)

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Returns the outputs, and the shares of attention where they are asked for.

        Args:
            query: shape `(B, T, dim)`.
            value: shape `(B, S, dim)`.
            key: shape `(B, S, dim)`; the value by default.
            query_mask: bools, shape `(B, T)`.
            value_mask: bools, shape `(B, S)`.
            key_mask: bools, shape `(B, S)`.
            attention_mask: bools, shape `(B, T, S)`, or with an axis for the heads after the batch.
            return_attention_scores: whether to return the shares too, shape `(B, heads, T, S)`.
            training: whether to drop; `module.training` where it is not given.
            use_causal_mask: whether each step attends only to those up to itself.
        """
        masks = {
            "query_mask": query_mask,
            "value_mask": value_mask,
            "key_mask": key_mask,
            "attention_mask": attention_mask,
        }
        return self._attended(
            query,
            value,
            key,
            masks,
            return_attention_scores=return_attention_scores,
            training=bool(training),
            use_causal_mask=use_causal_mask,
            num_repeats=1,
            scale=1 / math.sqrt(self.key_dim),
        )

    def compute_output_shape(self, query_shape: Any, value_shape: Any = None, key_shape: Any = None) -> Any:
        """See `Layer`."""
        return (*query_shape[:-1], *(self._output_shape or (query_shape[-1],)))

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "output_shape": None if self._output_shape is None else list(self._output_shape),
            "attention_axes": None if self.attention_axes is None else list(self.attention_axes),
            **self._common_config(),
        }
