"""`MultiHeadAttention` and `GroupedQueryAttention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import LayerError, UnsupportedError
from narrowcast.serialization import builtin, serialize
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.layers import initializers, regularizers
from narrowcast.torch.layers.activation import Softmax
from narrowcast.torch.layers.attending import (
    attend,
    attention_equations,
    causal_mask,
    merged_mask,
    projection_equation,
)
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.configs import positive, refuse
from narrowcast.torch.layers.dropout import Dropout
from narrowcast.torch.layers.einsum_dense import EinsumDense
from narrowcast.torch.layers.initializers import Initializer
from narrowcast.torch.layers.shapes import axis_length

__all__ = ["GroupedQueryAttention", "MultiHeadAttention"]


class _Attention(Layer):
    """What both kinds of attention have in common: the arguments for projections, masks, and the order of things.

    The projections are layers of their own: `query`, `key`, `value`, `attention_output`, and `gate` where there is one.
    """

    query: EinsumDense
    key: EinsumDense
    value: EinsumDense
    attention_output: EinsumDense
    gate: EinsumDense
    softmax: Softmax
    dropout_layer: Dropout
    _attention_axes: tuple[int, ...]

    def _take_common(
        self,
        *,
        dropout: float,
        use_bias: bool,
        sliding_window: int | None,
        flash_attention: Any,
        kernel_initializer: Any,
        bias_initializer: Any,
        kernel_regularizer: Any,
        bias_regularizer: Any,
        activity_regularizer: Any,
        kernel_constraint: Any,
        bias_constraint: Any,
        use_gate: bool,
        seed: int | None,
    ) -> None:
        refuse("constraint", kernel_constraint)
        refuse("constraint", bias_constraint)
        if flash_attention:
            raise UnsupportedError(
                "Argument flash_attention is not supported",
                fix="Leave it out: PyTorch takes its fastest kernel where no scores are asked for",
            )
        self.dropout = Dropout(dropout).rate  # which checks it
        self.use_bias, self.use_gate = bool(use_bias), bool(use_gate)
        self.sliding_window = positive("sliding_window", sliding_window, optional=True)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.projection_regularizer = regularizers.get(activity_regularizer)
        self.seed = seed
        self.supports_masking = True

    def _check_shapes(self, *shapes: Any, rank: int | None = None) -> None:
        for shape in shapes:
            if not isinstance(shape, tuple) or (len(shape) < 3 if rank is None else len(shape) != rank):
                raise LayerError(
                    f"{type(self).__name__} at {self.path!r} cannot attend over inputs of this shape",
                    got={"shape": shape},
                    expected="a batch, steps, and the length of each"
                    + (", or more axes of steps" if rank is None else ""),
                )
            axis_length(self, shape, -1)

    def _projection(self, equation: str, output_shape: Sequence[Any], bias_axes: str, **kwargs: Any) -> EinsumDense:
        return EinsumDense(
            equation,
            output_shape=tuple(output_shape),
            bias_axes=bias_axes if self.use_bias else None,
            # Another initializer for each: without a seed, each draws numbers of its own.
            kernel_initializer=_clone(self.kernel_initializer),
            bias_initializer=_clone(self.bias_initializer),
            kernel_regularizer=self.kernel_regularizer,
            bias_regularizer=self.bias_regularizer,
            activity_regularizer=self.projection_regularizer,
            **kwargs,
        )

    def _common_config(self) -> dict[str, Any]:
        return {
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "sliding_window": self.sliding_window,
            "kernel_initializer": serialize(self.kernel_initializer),
            "bias_initializer": serialize(self.bias_initializer),
            "kernel_regularizer": serialize(self.kernel_regularizer),
            "bias_regularizer": serialize(self.bias_regularizer),
            "activity_regularizer": serialize(self.projection_regularizer),
            "use_gate": self.use_gate,
            "seed": self.seed,
        }

    def _attended(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor | None,
        masks: dict[str, Any],
        *,
        return_attention_scores: bool,
        training: bool,
        use_causal_mask: bool,
        num_repeats: int,
        scale: float,
    ) -> Any:
        mask, is_causal = merged_mask(
            self, query, value, is_causal=use_causal_mask, window=self.sliding_window, **masks
        )
        gate = self.gate(query) if self.use_gate else None
        keys = self.key(value if key is None else key)
        queries, values = self.query(query), self.value(value)
        if num_repeats > 1:
            keys, values = keys.repeat_interleave(num_repeats, 2), values.repeat_interleave(num_repeats, 2)
        # An axis for the heads in front of those that are attended over.
        while mask is not None and mask.dim() < queries.dim() + len(self._attention_axes) - 1:
            mask = mask.unsqueeze(-2 * len(self._attention_axes) - 1)
        scores = None
        if queries.dim() == 4 and not return_attention_scores and not (training and self.dropout > 0):
            outputs = attend(queries, keys, values, mask, is_causal=is_causal, scale=scale)
        else:
            if is_causal:
                mask = causal_mask(queries, keys)
            outputs, scores = self._attend_openly(queries, keys, values, mask, training=training, scale=scale)
        if gate is not None:
            outputs = outputs * gate
        outputs = self.attention_output(outputs)
        return (outputs, scores) if return_attention_scores else outputs

    def _attend_openly(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, training: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention with its shares in the open: for scores, dropout, and other axes than the first."""
        dtype = query.dtype
        to_scores, to_outputs = attention_equations(query.dim(), self._attention_axes)
        query = query * scale
        if is_slow(query, dtype):
            query, key, value = query.float(), key.float(), value.float()
        scores = torch.einsum(to_scores, key, query)
        shares = self.softmax(scores, mask=mask)
        used = self.dropout_layer(shares, training=training)
        return torch.einsum(to_outputs, used.to(value.dtype), value).to(dtype), shares


def _clone(initializer: Any) -> Any:
    return initializer.clone() if isinstance(initializer, Initializer) else initializer


@builtin()
class MultiHeadAttention(_Attention):
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


@builtin("GroupQueryAttention")
class GroupedQueryAttention(_Attention):
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
