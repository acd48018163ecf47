"""`TransformerBlock`: attention and two dense layers, each with a norm and a way around it."""

from __future__ import annotations

from typing import Any

from narrowcast.serialization import builtin, serialize
from narrowcast.torch.layers import activations, initializers
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.configs import number, positive
from narrowcast.torch.layers.dense import Dense
from narrowcast.torch.layers.dropout import Dropout
from narrowcast.torch.layers.grouped_query_attention import GroupedQueryAttention
from narrowcast.torch.layers.multi_head_attention import MultiHeadAttention
from narrowcast.torch.layers.normalization import LayerNormalization
from narrowcast.torch.layers.shapes import axis_length

__all__ = ["TransformerBlock"]


@builtin()
class TransformerBlock(Layer):
    """`x + attention(norm(x))`, then `x + down(activation(up(norm(x))))`; or with the norms after the sums.

    Its layers are `attention`, `attention_norm`, `attention_dropout`, `up`, `down`, `feedforward_norm` and
    `feedforward_dropout`: a map as `dtype` names them so.

    Args:
        intermediate_dim: the width between `up` and `down`.
        num_heads: the heads of the attention; the width of the input must be a multiple.
        num_key_value_heads: for grouped-query attention, a divisor of `num_heads`; `None` for `MultiHeadAttention`.
        dropout: the share that is dropped in training, of attention and of both results.
        activation: between `up` and `down`.
        layer_norm_epsilon: the epsilon of both norms.
        kernel_initializer: for all kernels.
        bias_initializer: for all biases.
        normalize_first: whether norms come before attention and dense layers, or after the sums.
        use_causal_mask: whether each step attends only to those up to itself.
        kwargs: those of `Layer`.

    Example:
        >>> import torch
        >>> block = TransformerBlock(64, 4)
        >>> block(torch.ones(1, 5, 32)).shape, block.attention.query.path
        (torch.Size([1, 5, 32]), 'attention/query')
    """

    attention: Any

    def __init__(
        self,
        intermediate_dim: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        dropout: float = 0.0,
        activation: Any = "relu",
        layer_norm_epsilon: float = 1e-5,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        normalize_first: bool = True,
        use_causal_mask: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.intermediate_dim = positive("intermediate_dim", intermediate_dim)
        self.num_heads = positive("num_heads", num_heads)
        self.num_key_value_heads = positive("num_key_value_heads", num_key_value_heads, optional=True)
        self.dropout = Dropout(dropout).rate
        self.activation = activations.get(activation)
        self.layer_norm_epsilon = number("layer_norm_epsilon", layer_norm_epsilon)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.normalize_first, self.use_causal_mask = bool(normalize_first), bool(use_causal_mask)
        self.supports_masking = True

    def build(self, inputs_shape: Any) -> None:
        """Makes the layers; the last axis of the shape must be known."""
        width = axis_length(self, inputs_shape, -1)
        common = {"kernel_initializer": self.kernel_initializer, "bias_initializer": self.bias_initializer}
        size = max(width // self.num_heads, 1)
        if self.num_key_value_heads is None:
            self.attention = MultiHeadAttention(self.num_heads, size, dropout=self.dropout, **common)
        else:
            self.attention = GroupedQueryAttention(
                size, self.num_heads, self.num_key_value_heads, dropout=self.dropout, **common
            )
        self.attention_norm = LayerNormalization(epsilon=self.layer_norm_epsilon)
        self.attention_dropout = Dropout(self.dropout)
        self.up = Dense(self.intermediate_dim, self.activation, **_own(common))
        self.down = Dense(width, **_own(common))
        self.feedforward_norm = LayerNormalization(epsilon=self.layer_norm_epsilon)
        self.feedforward_dropout = Dropout(self.dropout)
        for layer in (self.attention, self.attention_norm, self.feedforward_norm, self.up):
            layer.build(inputs_shape)
        self.down.build((*inputs_shape[:-1], self.intermediate_dim))
        self.attention_dropout.build()
        self.feedforward_dropout.build()

    def call(self, inputs: Any, mask: Any = None, attention_mask: Any = None, training: bool | None = None) -> Any:
        """Returns the outputs, of the shape of the inputs.

        Args:
            inputs: shape `(B, T, width)`.
            mask: bools, shape `(B, T)`: which steps are there; the others are attended to by none.
            attention_mask: bools, shape `(B, T, T)`: which step attends to which.
            training: whether to drop; `module.training` where it is not given.
        """
        x = self._around(inputs, self.attention_norm, lambda y: self._attend(y, mask, attention_mask, training))
        return self._around(x, self.feedforward_norm, lambda y: self._feed_forward(y, training))

    def _around(self, x: Any, norm: LayerNormalization, compute: Any) -> Any:
        if self.normalize_first:
            return x + compute(norm(x))
        return norm(x + compute(x))

    def _attend(self, x: Any, mask: Any, attention_mask: Any, training: bool | None) -> Any:
        y = self.attention(
            x,
            x,
            value_mask=mask,
            attention_mask=attention_mask,
            training=training,
            use_causal_mask=self.use_causal_mask,
        )
        return self.attention_dropout(y, training=training)

    def _feed_forward(self, x: Any, training: bool | None) -> Any:
        return self.feedforward_dropout(self.down(self.up(x)), training=training)

    def compute_output_shape(self, inputs_shape: Any) -> Any:
        """See `Layer`."""
        return tuple(inputs_shape)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "dropout": self.dropout,
            "activation": activations.name_of(self.activation),
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "kernel_initializer": serialize(self.kernel_initializer),
            "bias_initializer": serialize(self.bias_initializer),
            "normalize_first": self.normalize_first,
            "use_causal_mask": self.use_causal_mask,
        }


def _own(common: dict[str, Any]) -> dict[str, Any]:
    """The initializers, each anew: without a seed, each draws numbers of its own."""
    return {name: value.clone() if hasattr(value, "clone") else value for name, value in common.items()}
