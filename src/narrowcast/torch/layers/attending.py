"""The arithmetic of attention between projected queries, keys and values, and the masks it goes by."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.torch.gemm import is_slow
from narrowcast.torch.layers.activation import as_mask

__all__ = ["attend", "attention_equations", "causal_mask", "merged_mask", "projection_equation"]


def projection_equation(num_free: int, num_summed: int, num_new: int) -> tuple[str, str]:
    """Returns the equation of a projection, and the labels of the axes that come in.

    Example:
        >>> projection_equation(2, 1, 2)
        ('abc,cde->abde', 'de')
    """
    letters = string.ascii_lowercase
    free, summed = letters[:num_free], letters[num_free : num_free + num_summed]
    new = letters[num_free + num_summed : num_free + num_summed + num_new]
    return f"{free}{summed},{summed}{new}->{free}{new}", new


def attention_equations(rank: int, axes: Sequence[int]) -> tuple[str, str]:
    """Returns the equation of the scores, from keys and queries, and of the outputs, from shares and values.

    Args:
        rank: how many axes projected queries have: batch, others, heads, channels.
        axes: those that are attended over.

    Example:
        >>> attention_equations(4, (1,))
        ('aecd,abcd->acbe', 'acbe,aecd->abcd')
    """
    letters = string.ascii_lowercase
    queries = letters[:rank]
    further = iter(letters[rank:])
    keys = "".join(next(further) if axis in axes else queries[axis] for axis in range(rank))
    batch = [queries[axis] for axis in range(rank - 1) if axis not in axes]
    scores = "".join([*batch, *(queries[axis] for axis in axes), *(keys[axis] for axis in axes)])
    return f"{keys},{queries}->{scores}", f"{scores},{keys}->{queries}"


def causal_mask(query: Tensor, value: Tensor) -> Tensor:
    """Returns bools, shape `(1, T, S)`: each step attends to those up to itself."""
    return torch.ones(1, query.shape[1], value.shape[1], dtype=torch.bool, device=query.device).tril()


def merged_mask(
    layer: Any,
    query: Tensor,
    value: Tensor,
    *,
    query_mask: Any,
    value_mask: Any,
    key_mask: Any,
    attention_mask: Any,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor | None, bool]:
    """Brings all masks together.

    Args:
        layer: for the words of errors.
        query: shape `(B, T, ...)`.
        value: shape `(B, S, ...)`.
        query_mask: bools, shape `(B, T)`, or `None`.
        value_mask: bools, shape `(B, S)`, or `None`.
        key_mask: bools, shape `(B, S)`, or `None`.
        attention_mask: bools that broadcast to `(B, T, S)` or to the scores, or `None`.
        is_causal: whether each step attends only to those up to itself.
        window: how far each step attends to either side, counting itself; `None` for any distance.

    Returns:
        The mask, or `None` where there is none; and whether the causal one is not in it, being the only one.
    """
    found: list[Tensor] = []
    if query_mask is not None:
        found.append(as_mask(layer, query_mask).unsqueeze(-1))
    found += [as_mask(layer, mask).unsqueeze(-2) for mask in (value_mask, key_mask) if mask is not None]
    if window is not None:
        rows = torch.arange(query.shape[1], device=query.device)
        columns = torch.arange(value.shape[1], device=query.device)
        found.append(((rows[:, None] - columns[None, :]).abs() < window).unsqueeze(0))
    if attention_mask is not None:
        found.append(as_mask(layer, attention_mask))
    if is_causal and found:
        found.append(causal_mask(query, value))
    if not found:
        return None, is_causal
    mask = found[0]
    for other in found[1:]:
        mask = _both(mask, other)
    return mask, False


def _both(mask: Tensor, other: Tensor) -> Tensor:
    # One of them may have an axis for the heads, after the batch.
    while mask.dim() < other.dim():
        mask = mask.unsqueeze(-3)
    while other.dim() < mask.dim():
        other = other.unsqueeze(-3)
    return mask & other


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float) -> Tensor:
    """Returns the outputs of attention over axis 1, by PyTorch's fused kernels.

    Args:
        query: shape `(B, T, N, H)`.
        key: shape `(B, S, N, H)`.
        value: shape `(B, S, N, V)`.
        mask: bools that broadcast to `(B, N, T, S)`, or `None`.
        is_causal: whether each step attends only to those up to itself; only without a mask.
        scale: what products of queries and keys are multiplied by.

    Returns:
        Shape `(B, T, N, V)`, in the dtype of the query. Zeros where a step attends to nothing.

    Numerics:
        In float32 where the CPU multiplies the dtype slowly, then rounded.
    """
    dtype = query.dtype
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if is_slow(query, dtype):
        q, k, v = q.float(), k.float(), v.float()
    attended = None
    if mask is not None:
        attended = mask.any(-1, keepdim=True)
        mask = mask | ~attended  # a finite gradient where a step attends to nothing
    outputs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    if attended is not None:
        outputs = outputs.masked_fill(~attended, 0)
    return outputs.transpose(1, 2).to(dtype)
