"""The product of a float8 layer, with its gradients: one function a recipe.

Names of axes: r row (token), i inner, o output channel.

    recipe    scale of the input    of the weight     of the gradient     forward               backward
    delayed   one, from history     one, from history one, from history   e4m3 x e4m3           e5m2 x e4m3
    current   one, from the data    one               one                 e4m3 x e4m3           e5m2 x e4m3
    rowwise   one a row             one a channel     one a row, column   e4m3 x e4m3           e5m2 x e4m3
    block     1 x 128 elements      128 x 128         1 x 128, 128 x 1    e4m3 x e4m3           e5m2 x e4m3

Every scale is float32 and is taken from values in float32. A tensor (or row, or block) that holds NaN or infinity gets
a `scale_inv` of NaN: clipping would hide an infinity, and whoever looks for one afterwards (a loss scaler) must find
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from narrowcast.torch.float8_gemm import engine_for
from narrowcast.torch.float8_rounding import FORWARD, GRADIENT, Format, Number, round_to
from narrowcast.torch.float8_scaling import Scaling, current_scale, scaling_of, snapshot
from narrowcast.torch.gemm import is_slow

__all__ = ["BLOCK", "block", "by_row", "by_tensor", "scales_along"]

BLOCK = 128
"""The length of a block along each of its longer sides."""


def by_tensor(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    stored: Tensor | None = None,
    pending: Tensor | None = None,
    margin: int = 0,
    wide_gradient: bool = False,
) -> Tensor:
    """Returns `x_ri @ weight_oi.T + bias_o` in float8, one scale a tensor.

    Args:
        x: floats, two axes, at least one element.
        weight: floats, the parameter in the variable dtype; its gradient arrives in it.
        bias: floats, or `None`.
        dtype: the dtype of the result.
        stored: the scales of input, weight and gradient, float32, shape `(3,)`; 0 where there is none yet. `None`: all
            come from the data.
        pending: the pending amaxes of the three, merged in place; `None`: nothing is recorded.
        margin: powers of two to stay below the largest value where a scale comes from the data.
        wide_gradient: whether the weight's gradient is multiplied in `dtype` and not in float8.

    Returns:
        Shape `(r, o)`, `dtype`.
    """
    with torch.no_grad():
        x_pending, weight_pending, grad_pending = (None,) * 3 if pending is None else torch.split(pending, 1)
        of_x = scaling_of(x.detach(), snapshot(stored, 0, x), x_pending, FORWARD, margin)
        of_weight = scaling_of(weight.detach(), snapshot(stored, 1, x), weight_pending, FORWARD, margin)
        grad_stored = snapshot(stored, 2, x)  # the state may move on before backward
    options = (dtype, margin, wide_gradient)
    result: Tensor = _ByTensor.apply(x, weight, bias, *of_x, *of_weight, grad_stored, grad_pending, *options)  # type: ignore[no-untyped-call]
    return result


class _ByTensor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_scale: Number,
        x_inverse: Number,
        x_clip: bool,
        weight_scale: Number,
        weight_inverse: Number,
        weight_clip: bool,
        grad_stored: Number | None,
        grad_pending: Tensor | None,
        dtype: torch.dtype,
        margin: int,
        wide_gradient: bool,
    ) -> Tensor:
        engine = engine_for(x, weight, dtype, by_row=False)
        codes = engine.quantize(x, x_scale, FORWARD, clip=x_clip)
        weight_codes = engine.quantize(weight, weight_scale, FORWARD, clip=weight_clip)
        ctx.save_for_backward(x if wide_gradient else codes, weight_codes if engine.keeps_weight else weight)
        ctx.weight_dtype = weight.dtype
        ctx.scalings = (x_inverse, Scaling(weight_scale, weight_inverse, weight_clip), grad_stored, grad_pending)
        ctx.options = (dtype, margin, wide_gradient, x.dtype, None if bias is None else bias.dtype)
        return engine.forward(codes, weight_codes, x_inverse, weight_inverse, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _without_autocast(_by_tensor_gradients, ctx, *grads)


def _by_tensor_gradients(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    x_inverse, of_weight, grad_stored, grad_pending = ctx.scalings
    dtype, margin, wide_gradient, x_dtype, bias_dtype = ctx.options
    engine = engine_for(grad, weight, dtype, by_row=False)
    of_grad = scaling_of(grad, grad_stored, grad_pending, GRADIENT, margin)
    codes = engine.quantize(grad, of_grad.scale, GRADIENT, clip=of_grad.clip, scratch="gradient")
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        weight_codes = weight
        if not engine.keeps_weight:
            weight_codes = engine.quantize(weight, of_weight.scale, FORWARD, clip=of_weight.clip)
        grad_x = engine.grad_input(codes, weight_codes, of_grad.inverse, of_weight.inverse, x_dtype)
    if ctx.needs_input_grad[1]:
        if wide_gradient:
            grad_weight = _wide_grad_weight(grad, x, dtype, ctx.weight_dtype)
        else:
            grad_weight = engine.grad_weight(codes, x, of_grad.inverse, x_inverse, ctx.weight_dtype)
    return grad_x, grad_weight, _grad_bias(ctx, grad, bias_dtype), *(None,) * 11


def _without_autocast(gradients: Callable[[Any, Tensor], Any], ctx: Any, grad: Tensor) -> Any:
    # A backward inside a `torch.autocast` region would multiply in its dtype.
    if torch._C._is_any_autocast_enabled():
        with torch.autocast(grad.device.type, enabled=False):
            return gradients(ctx, grad)
    return gradients(ctx, grad)


def _grad_bias(ctx: Any, grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    # Sums of 16-bit floats are accumulated in float32, whatever is asked; asking costs several times as much.
    return grad.sum(0).to(dtype) if ctx.needs_input_grad[2] else None


def _wide_grad_weight(grad: Tensor, x: Tensor, dtype: torch.dtype, weight_dtype: torch.dtype) -> Tensor:
    wide = torch.float32 if is_slow(grad, dtype) else dtype
    return torch.mm(grad.to(wide).t(), x.to(wide)).to(weight_dtype)


def by_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, wide_gradient: bool = False
) -> Tensor:
    """Returns `x_ri @ weight_oi.T + bias_o` in float8, one scale for each row of what is multiplied.

    The backward products sum over other axes, so every tensor is rounded twice, each time from its own values.
    Arguments as in `by_tensor`.
    """
    result: Tensor = _ByRow.apply(x, weight, bias, dtype, wide_gradient)  # type: ignore[no-untyped-call]
    return result


class _ByRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wide_gradient: bool
    ) -> Tensor:
        engine = engine_for(x, weight, dtype, by_row=True)
        x_scale, x_inv = scales_along(x, 1, FORWARD)
        weight_scale, weight_inv = scales_along(weight, 1, FORWARD)
        ctx.save_for_backward(x, weight)
        ctx.options = (dtype, wide_gradient)
        ctx.bias_dtype = None if bias is None else bias.dtype
        codes = engine.quantize(x, x_scale, FORWARD, clip=False)
        weight_codes = engine.quantize(weight, weight_scale, FORWARD, clip=False)
        return engine.forward(codes, weight_codes, x_inv, weight_inv, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _without_autocast(_by_row_gradients, ctx, *grads)


def _by_row_gradients(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    dtype, wide_gradient = ctx.options
    engine = engine_for(grad, weight, dtype, by_row=True)
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        scale, inverse = scales_along(grad, 1, GRADIENT)
        weight_scale, weight_inv = scales_along(weight, 0, FORWARD)
        codes = engine.quantize(grad, scale, GRADIENT, clip=False)
        weight_codes = engine.quantize(weight, weight_scale, FORWARD, clip=False)
        grad_x = engine.grad_input(codes, weight_codes, inverse, weight_inv, dtype).to(x.dtype)
    if ctx.needs_input_grad[1] and wide_gradient:
        grad_weight = _wide_grad_weight(grad, x, dtype, weight.dtype)
    elif ctx.needs_input_grad[1]:
        scale, inverse = scales_along(grad, 0, GRADIENT)
        x_scale, x_inv = scales_along(x, 0, FORWARD)
        codes = engine.quantize(grad, scale, GRADIENT, clip=False)
        x_codes = engine.quantize(x, x_scale, FORWARD, clip=False)
        grad_weight = engine.grad_weight(codes, x_codes, inverse, x_inv, dtype).to(weight.dtype)
    return grad_x, grad_weight, _grad_bias(ctx, grad, ctx.bias_dtype), None, None


def scales_along(x: Tensor, axis: int, to: Format) -> tuple[Tensor, Tensor]:
    """Returns the scale and its inverse for all that lies along an axis, which is kept at length 1."""
    magnitude = x.abs().amax(axis, keepdim=True).float()
    scale = current_scale(magnitude, to.largest)
    return scale, scale.reciprocal()


def block(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, wide_gradient: bool = False) -> Tensor:
    """Returns `x_ri @ weight_oi.T + bias_o` in float8, one scale for each block of what is multiplied.

    Blocks are 1 x 128 of activations and gradients along the axis that is summed over, 128 x 128 of weights; at the
    edges they are smaller. Multiplied in float32 on every device. Arguments as in `by_tensor`.
    """
    result: Tensor = _Block.apply(x, weight, bias, dtype, wide_gradient)  # type: ignore[no-untyped-call]
    return result


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wide_gradient: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (dtype, wide_gradient)
        ctx.bias_dtype = None if bias is None else bias.dtype
        values = round_blocks(x, (1, BLOCK), FORWARD)
        weight_values = round_blocks(weight, (BLOCK, BLOCK), FORWARD)
        return F.linear(values, weight_values, None if bias is None else bias.float()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _without_autocast(_block_gradients, ctx, *grads)


def _block_gradients(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    dtype, wide_gradient = ctx.options
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        weight_values = round_blocks(weight, (BLOCK, BLOCK), FORWARD)
        grad_x = torch.mm(round_blocks(grad, (1, BLOCK), GRADIENT), weight_values).to(x.dtype)
    if ctx.needs_input_grad[1] and wide_gradient:
        grad_weight = _wide_grad_weight(grad, x, dtype, weight.dtype)
    elif ctx.needs_input_grad[1]:
        values = round_blocks(x, (BLOCK, 1), FORWARD)
        grad_weight = torch.mm(round_blocks(grad, (BLOCK, 1), GRADIENT).t(), values).to(weight.dtype)
    return grad_x, grad_weight, _grad_bias(ctx, grad, ctx.bias_dtype), None, None


def round_blocks(x: Tensor, sizes: tuple[int, int], to: Format) -> Tensor:
    """Returns a matrix rounded to float8 and multiplied back, one scale for each block; float32, the shape of `x`.

    Example:
        >>> round_blocks(torch.tensor([[1.0, 0.3]]), (1, 2), FORWARD)
        tensor([[1.0000, 0.2857]])
    """
    rows, columns = x.shape
    below, right = -rows % sizes[0], -columns % sizes[1]
    full = F.pad(x, (0, right, 0, below)) if below or right else x
    blocks = full.reshape(full.shape[0] // sizes[0], sizes[0], full.shape[1] // sizes[1], sizes[1])
    magnitude = blocks.abs().amax((1, 3), keepdim=True).float()
    scale = current_scale(magnitude, to.largest)
    values = round_to(blocks, scale, to, clip=False).mul_(scale.reciprocal())
    return values.reshape(full.shape)[:rows, :columns]
