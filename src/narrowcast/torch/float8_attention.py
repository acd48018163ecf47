"""`nn.MultiheadAttention` whose projections multiply in float8 while it trains; what lies between them stays float."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast.torch.attention import ProjectedAttention
from narrowcast.torch.float8_linear import DelayedLinear, Float8Linear
from narrowcast.torch.float8_scheme import Float8Layer, Float8Scheme, blockwise, current, delayed, rowwise
from narrowcast.torch.float8_state import Stateful
from narrowcast.torch.scheme import register

__all__ = ["DelayedAttention", "Float8Attention"]

PRODUCTS = 3
"""Queries, keys and values. Where they come from one tensor, the first product makes all that come from it."""


class Float8Attention(Float8Layer, ProjectedAttention):
    """Multi-head attention with its projections in float8. `out_proj` is a `Float8Linear` of its own.

    Numerics:
        What lies between the projections as `ProjectedAttention`.
    """

    def _narrowcast_projected(
        self, query: Tensor, key: Tensor, value: Tensor, inner: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values in the dtype `inner`; those that come from one tensor by one product."""
        module: Any = self
        width = module.embed_dim
        bias = None if module.in_proj_bias is None else self._narrowcast_narrow("in_proj_bias")
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        if module.in_proj_weight is None:
            weights = [self._narrowcast_master(f"{name}_proj_weight") for name in "qkv"]
        else:
            weight = self._narrowcast_master("in_proj_weight")
            if query is key and key is value:
                return self._narrowcast_multiply(0, query, weight, bias, inner).chunk(3, dim=-1)
            if key is value:
                rest = None if bias is None else bias[width:]
                queries = self._narrowcast_multiply(0, query, weight[:width], biases[0], inner)
                return queries, *self._narrowcast_multiply(1, key, weight[width:], rest, inner).chunk(2, dim=-1)
            weights = list(weight.chunk(3))
        parts = zip((query, key, value), weights, biases, strict=True)
        return tuple(self._narrowcast_multiply(product, *part, inner) for product, part in enumerate(parts))


class DelayedAttention(Stateful, Float8Attention):
    """Multi-head attention with its projections in float8 and delayed scaling."""


_DELAYED = Float8Scheme(delayed, DelayedAttention, output=DelayedLinear, num_products=PRODUCTS, has_state=True)

register("float8", ["attention"], _DELAYED)
register("float8/current", ["attention"], Float8Scheme(current, Float8Attention, output=Float8Linear))
register("float8/rowwise", ["attention"], Float8Scheme(rowwise, Float8Attention, output=Float8Linear, by_row=True))
register("float8/block", ["attention"], Float8Scheme(blockwise, Float8Attention, output=Float8Linear, has_gemm=False))
