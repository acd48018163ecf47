"""What `MultiHeadAttention` and `GroupedQueryAttention` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import LayerError, UnsupportedError
from narrowcast.serialization import serialize
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.layers import initializers, regularizers
from narrowcast.torch.layers.activation import Softmax
from narrowcast.torch.layers.attending import (
    attend,
    attention_equations,
    causal_mask,
    merged_mask,
)
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.configs import positive, refuse
from narrowcast.torch.layers.dropout import Dropout
from narrowcast.torch.layers.einsum_dense import EinsumDense
from narrowcast.torch.layers.initializers import Initializer
from narrowcast.torch.layers.shapes import axis_length

__all__ = ["Attention"]


class Attention(Layer):
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
