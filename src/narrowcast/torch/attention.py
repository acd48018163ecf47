"""Multi-head attention around projections of any kind: masks, extra positions, scores, mixing.

Names of axes: b batch, h head, l target position, s source position, d width of a head, e width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.torch.carried import Cast
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.inputs import cast_floats, cast_mask

__all__ = ["ProjectedAttention"]


class ProjectedAttention(Cast):
    """`nn.MultiheadAttention` whose queries, keys and values `_narrowcast_projected` makes; `out_proj` is called.

    Numerics:
        Scores, softmax and mixing in the compute dtype (in float32 where the CPU multiplies that slowly). Masks and
        shapes mean what they mean in `nn.MultiheadAttention`.
    """

    def _narrowcast_projected(
        self, query: Tensor, key: Tensor, value: Tensor, inner: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values, `(..., e)`, in the dtype `inner`."""
        raise NotImplementedError

    def _narrowcast_run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        module: Any = self
        compute = self._narrowcast_compute
        inner = torch.float32 if is_slow(query, compute) else compute
        is_batched = F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, module.num_heads)  # type: ignore[attr-defined]
        key_padding_mask, attn_mask = _additive(key_padding_mask, attn_mask, compute, inner)
        if is_causal and attn_mask is None:
            # RuntimeError, as in PyTorch.
            raise RuntimeError("Attention got is_causal=True without attn_mask. It is a hint about a mask: give both.")
        q, k, v = self._narrowcast_projected(query, key, value, inner)
        batch_first = is_batched and module.batch_first
        if not is_batched:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = (_heads(x, module.num_heads, batch_first=batch_first) for x in (q, k, v))
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
        k, v, num_extra = _with_extra_positions(module, k, v)
        mask = _merged(attn_mask, key_padding_mask, q.shape[0], module.num_heads, num_extra)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            weights = _scores(q, k, mask)
            if dropout > 0.0:
                weights = F.dropout(weights, p=dropout)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        # (b, h, l, d) to (l, b, e) or (b, l, e)
        mixed = mixed.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2)
        y = module.out_proj(mixed.to(compute))
        if weights is not None:
            weights = (weights.mean(1) if average_attn_weights else weights).to(compute)
        if not is_batched:
            y, weights = y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y, weights


def _heads(x: Tensor, num_heads: int, *, batch_first: bool) -> Tensor:
    """From (l, b, e), or (b, l, e), to (b, h, l, d)."""
    x = x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def _with_extra_positions(module: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Appends the learned key and value, and a position of zeros, where the module has them."""
    num_batch, num_heads, _, width = k.shape
    num_extra = 0
    if module.bias_k is not None:
        extra = (num_batch, num_heads, 1, width)
        k = torch.cat([k, module.bias_k.to(k.dtype).view(1, num_heads, 1, width).expand(extra)], dim=2)
        v = torch.cat([v, module.bias_v.to(v.dtype).view(1, num_heads, 1, width).expand(extra)], dim=2)
        num_extra += 1
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        num_extra += 1
    return k, v, num_extra


def _additive(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, compute: torch.dtype, inner: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as what is added to the scores; PyTorch checks them, with its own words."""
    padding = F._canonical_mask(
        mask=key_padding_mask,
        mask_name="key_padding_mask",
        other_type=F._none_or_dtype(attn_mask),
        other_name="attn_mask",
        target_type=inner,
    )
    mask = F._canonical_mask(
        mask=attn_mask,
        mask_name="attn_mask",
        other_type=None,
        other_name="",
        target_type=inner,
        check_other=False,
    )
    return cast_floats(cast_mask(padding, compute), inner), cast_floats(cast_mask(mask, compute), inner)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_batch: int, num_heads: int, num_extra: int
) -> Tensor | None:
    """One mask that broadcasts against (b, h, l, s). The extra positions are never masked."""
    if attn_mask is not None:
        attn_mask = F.pad(attn_mask, (0, num_extra))
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(num_batch, num_heads, *attn_mask.shape[1:])
    if key_padding_mask is not None:
        key_padding_mask = F.pad(key_padding_mask, (0, num_extra))[:, None, None, :]
        return key_padding_mask if attn_mask is None else attn_mask + key_padding_mask
    return attn_mask


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    return torch.softmax(scores if mask is None else scores + mask, dim=-1)
