"""`GroupedQueryAttention`: several heads of the query to each of keys and values."""

from __future__ import annotations

import math
from typing import Any

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers.activation import Softmax
from narrowcast.torch.layers.attention import Attention
from narrowcast.torch.layers.configs import positive
from narrowcast.torch.layers.dropout import Dropout

__all__ = ["GroupedQueryAttention"]


@builtin("GroupQueryAttention")
class GroupedQueryAttention(Attention):
    """Attention in which several heads of the query share one of the keys and values.

    Args:
        head_dim: the size of a head.
        num_query_heads: the number of heads of the query.
        num_key_value_heads: the number of heads of keys and values, a divisor of it.
        dropout: see `MultiHeadAttention`, as all that follow.
        use_bias: see there.
        sliding_window: see there.
        flash_attention: not supported.
        kernel_initializer: see there.
        bias_initializer: see there.
        kernel_regularizer: see there.
        bias_regularizer: see there.
        activity_regularizer: see there.
        kernel_constraint: not supported.
        bias_constraint: not supported.
        use_gate: see there.
        seed: see there.
        kwargs: those of `Layer`.

    Example:
        >>> import torch
        >>> layer = GroupedQueryAttention(8, 4, 2)
        >>> layer(torch.ones(1, 5, 16), torch.ones(1, 6, 16)).shape, layer.key.kernel.shape
        (torch.Size([1, 5, 16]), torch.Size([16, 2, 8]))
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
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
        self.head_dim = positive("head_dim", head_dim)
        self.num_query_heads = positive("num_query_heads", num_query_heads)
        self.num_key_value_heads = positive("num_key_value_heads", num_key_value_heads)
        if num_query_heads % num_key_value_heads:
            raise LayerError(
                "Heads of the query cannot be shared out",
                got={"num_query_heads": num_query_heads, "num_key_value_heads": num_key_value_heads},
                expected="a multiple of the heads of keys and values",
            )

    def build(self, query_shape: Any, value_shape: Any = None, key_shape: Any = None) -> None:
        """Makes the projections; the value has the shape of the query, and the key that of the value, by default."""
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape, rank=3)
        self._attention_axes = (1,)
        heads = (None, self.num_query_heads, self.head_dim)
        shared = (None, self.num_key_value_heads, self.head_dim)
        self.query = self._projection("bqm,muh->bquh", heads, "uh")
        self.key = self._projection("bkm,mvh->bkvh", shared, "vh")
        if self.use_gate:
            self.gate = self._projection("bqm,muh->bquh", heads, "uh", activation="sigmoid")
        self.value = self._projection("bkm,mvh->bkvh", shared, "vh")
        self.softmax = Softmax(axis=-1)
        self.dropout_layer = Dropout(self.dropout, seed=self.seed)
        self.attention_output = self._projection("bquh,uhm->bqm", (None, query_shape[-1]), "m")
        for layer, shape in ((self.query, query_shape), (self.key, key_shape), (self.value, value_shape)):
            layer.build(shape)
        if self.use_gate:
            self.gate.build(query_shape)
        self.softmax.build()
        self.dropout_layer.build()
        self.attention_output.build((None, None, self.num_query_heads, self.head_dim))

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
        """Returns the outputs, and the shares of attention where they are asked for; see `MultiHeadAttention`."""
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
            num_repeats=self.num_query_heads // self.num_key_value_heads,
            scale=1 / math.sqrt(self.head_dim),
        )

    def compute_output_shape(self, query_shape: Any, value_shape: Any = None, key_shape: Any = None) -> Any:
        """See `Layer`."""
        return tuple(query_shape)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "head_dim": self.head_dim,
            "num_query_heads": self.num_query_heads,
            "num_key_value_heads": self.num_key_value_heads,
            **self._common_config(),
        }
