"""A linear layer's arithmetic on weights stored as float8: activations by frozen scales, by their own, or as they are.

Names of axes: r row (token), i inner, o output channel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.torch.float8_gemm import engine_for
from narrowcast.torch.float8_product import scales_along
from narrowcast.torch.float8_rounding import FORWARD, round_to
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.stored_weights import dequantize
from narrowcast.torch.straight_through import by_torch, differentiable, in_shape_of, is_left_to_torch, wants_gradient

__all__ = ["dynamic", "of_weights", "static"]

_Arithmetic = Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def static(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, input_scale: Tensor
) -> Tensor:
    """Returns `x @ weight.T + bias` with `x` rounded to float8 by a scale that was frozen after training.

    Args:
        x: floats, shape `(..., i)`.
        codes: the weight's codes, float8_e4m3fn, shape `(o, i)`.
        scale: what the codes are multiplied by, float32, one element.
        bias: floats, shape `(o,)`, or `None`.
        dtype: the dtype of the result.
        input_scale: what `x` is multiplied by before it is rounded, float32, no axes.

    Returns:
        Shape `(..., o)`.

    Numerics:
        What is larger than anything seen in training is clipped, infinity too; NaN stays NaN.
    """
    return _run(
        partial(_static, input_scale=input_scale), partial(_static_values, input_scale), x, codes, scale, bias, dtype
    )


def dynamic(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias` with `x` rounded to float8, each row by its own largest magnitude.

    Arguments as in `static`, with a `scale` for each output channel, shape `(o, 1)`.

    Numerics:
        A row that holds NaN or infinity gives a row without a number.
    """
    return _run(_dynamic, _dynamic_values, x, codes, scale, bias, dtype)


def of_weights(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias` on the dequantized weight, `x` as it is. Arguments as in `dynamic`.

    Numerics:
        bfloat16 and float32 hold codes exactly, so they are multiplied as they are and the scale is applied to the
        sum. In float16 such sums could overflow: there the weight is rounded once more.
    """
    return _run(_of_weights, None, x, codes, scale, bias, dtype)


def _run(
    arithmetic: _Arithmetic,
    values: Callable[[Tensor], Tensor] | None,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Runs an arithmetic, with its gradient if one is asked for. `values` says what `x` is rounded to."""
    if is_left_to_torch(x, codes):
        return by_torch(x.to(dtype) if x.is_floating_point() else x, codes, scale, bias, dtype)
    if not wants_gradient(x, bias):
        return arithmetic(x, codes, scale, bias, dtype)
    if not torch.compiler.is_compiling():
        return differentiable(x, codes, scale, bias, dtype, arithmetic)
    # Traced, in plain operators whose gradient is the right one.
    if values is not None:
        x = x + (values(x.detach()) - x).detach()
    return by_torch(x.to(dtype), codes, scale, bias, dtype)


def _static(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, *, input_scale: Tensor
) -> Tensor:
    engine = engine_for(x, codes, dtype, by_row=False)
    operand = engine.quantize(x.reshape(-1, codes.shape[1]), input_scale, FORWARD)
    y = engine.forward(operand, engine.stored(codes), input_scale.reciprocal(), scale, _cast(bias, dtype), dtype)
    return in_shape_of(x, y)


def _static_values(input_scale: Tensor, x: Tensor) -> Tensor:
    return round_to(x, input_scale, FORWARD) / input_scale


def _dynamic(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    engine = engine_for(x, codes, dtype, by_row=True)
    rows = x.reshape(-1, codes.shape[1])
    row_scale, row_inverse = scales_along(rows, 1, FORWARD)
    operand = engine.quantize(rows, row_scale, FORWARD, clip=False)
    y = engine.forward(operand, engine.stored(codes), row_inverse, scale, _cast(bias, dtype), dtype)
    return in_shape_of(x, y)


def _dynamic_values(x: Tensor) -> Tensor:
    row_scale, row_inverse = scales_along(x, -1, FORWARD)
    return round_to(x, row_scale, FORWARD, clip=False) * row_inverse


def _of_weights(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = torch.float32 if is_slow(codes, dtype) else dtype
    rows = x.reshape(-1, codes.shape[1]).to(dtype).to(wide)
    if wide is torch.float16:
        y = F.linear(rows, dequantize(codes, scale, wide)).float()
    else:
        y = F.linear(rows, codes.to(wide))
        y = (y.float() if wide is torch.bfloat16 else y) * scale.reshape(-1)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return in_shape_of(x, y).to(dtype)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)
