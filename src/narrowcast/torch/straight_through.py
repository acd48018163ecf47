"""Layers that multiply by codes, seen from autograd: the gradient is the one through the dequantized weight.

An *arithmetic* is a function of `(x, codes, scale, bias, dtype)` that returns `x @ (codes * scale).T + bias`, rounded
somewhere on the way; the rounding counts as if it were not there (straight-through).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.torch.gemm import is_slow
from narrowcast.torch.stored_weights import dequantize

__all__ = ["by_torch", "differentiable", "gradients", "in_shape_of", "is_left_to_torch", "wants_gradient"]


def is_left_to_torch(x: Tensor, codes: Tensor) -> bool:
    """Says whether there is nothing to multiply, or an error for which PyTorch has the words."""
    if x.dim() == 0 or x.numel() == 0 or codes.numel() == 0:
        return True
    return x.shape[-1] != codes.shape[-1] or not x.is_floating_point()


def by_torch(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns what PyTorch makes of it on the dequantized weight, an error included."""
    return F.linear(x, dequantize(codes, scale, dtype), bias if bias is None else bias.to(dtype))


def in_shape_of(x: Tensor, rows: Tensor) -> Tensor:
    """Returns rows of results in the leading shape of `x`; where `x` is rows itself, the same tensor, no view."""
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[-1])


def wants_gradient(x: Tensor, bias: Tensor | None) -> bool:
    """Says whether a gradient may be asked for."""
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def gradients(grad: Tensor, stored: Any, dtypes: Any, needs: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of input and bias, and `None` for those that nobody needs.

    The dequantized weight is made anew and not kept from forward.
    """
    codes, scale = stored
    wide = torch.float32 if is_slow(codes, grad.dtype) else grad.dtype
    grad_x = grad_bias = None
    if needs[0]:
        grad_x = torch.matmul(grad.to(wide), dequantize(codes, scale, wide)).to(dtypes[0])
    if needs[3]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).to(wide).sum(0).to(dtypes[1])
    return grad_x, grad_bias


class _Differentiable(torch.autograd.Function):
    """Any arithmetic, eager. (Tracing it makes PyTorch 2.13 warn of itself.)"""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        arithmetic: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return arithmetic(x, codes, scale, bias, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, grad_bias = gradients(grads[0], ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad)
        return grad_x, None, None, grad_bias, None, None


def differentiable(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, arithmetic: Callable[..., Tensor]
) -> Tensor:
    """Returns `arithmetic(x, codes, scale, bias, dtype)` with its gradient."""
    # Flattened out here: a view made inside of the function may not be written to, as `ReLU(inplace=True)` would.
    rows = x if x.dim() == 2 else x.reshape(-1, codes.shape[1])
    y: Tensor = _Differentiable.apply(rows, codes, scale, bias, dtype, arithmetic)  # type: ignore[no-untyped-call]
    return in_shape_of(x, y)
