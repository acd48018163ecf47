"""A linear layer's arithmetic on 8-bit weights: eager, with gradients, and traced.

Names of axes: r row (token), i inner, o output channel.

`linear` quantizes activations row by row and multiplies codes by codes; `linear_of_weights` multiplies floats by the
codes of the weight as they are. In both the gradient is the one through the dequantized weight (straight-through).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.numerics.scaling import SMALLEST_AMAX
from narrowcast.torch import kernels
from narrowcast.torch.cpu_kernels import has_dot_product
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.stored_weights import dequantize
from narrowcast.torch.straight_through import (
    by_torch,
    differentiable,
    gradients,
    in_shape_of,
    is_left_to_torch,
    wants_gradient,
)

__all__ = ["linear", "linear_of_weights"]

_LARGEST = torch.tensor(127.0, device="cpu")  # a tensor: Python's 127.0 / x is 127.0 * (1 / x), which differs
_STEP = 1 / 127.0

MAX_PACKED_ROWS = 4
"""Up to so many rows `_weight_int8pack_mm` is faster than a bfloat16 linear (2 x at 4 rows, slower from 16 on)."""

PACKED_STEP = 32
"""`_weight_int8pack_mm` reads past the end of a row (and crashes) unless its length is a multiple of this.

Of 8 with AVX2, and of 32 with AVX-512, the widest it is built for.
"""

_BLOCK = 2**20
"""So many elements of a weight are made floats at a time: they stay in the caches, and no layer is held twice."""


def linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias` with `x` rounded to 8 bits, each row with a scale of its own.

    Args:
        x: floats, shape `(..., i)`, any strides.
        codes: the weight's codes, int8, shape `(o, i)`.
        scale: the weight's scale, float32, shape `(o, 1)`.
        bias: floats, shape `(o,)`, or `None`.
        dtype: the dtype of the result.

    Returns:
        Shape `(..., o)`.

    Numerics:
        `narrowcast.numerics.int8.quantize_rows` says what becomes of a row (one whose largest magnitude is below
        2**-100 counts as zeros). The product of codes is exact; float32 from there on; one rounding to `dtype` at the
        end. A row that holds NaN or infinity gives a row without a number. The result is off from that on the
        dequantized weight by at most `amax / 254 * sum(abs(weight))` for each row and channel.
    """
    if is_left_to_torch(x, codes):
        return by_torch(x, codes, scale, bias, dtype)
    if torch.compiler.is_compiling():
        if wants_gradient(x, bias) and not torch.compiler.is_exporting():
            return torch.ops.narrowcast.int8_linear(x, codes, scale, bias, dtype)  # type: ignore[no-any-return]
        return _eight_bit_traced(x, codes, scale, bias, dtype)
    if wants_gradient(x, bias):
        return differentiable(x, codes, scale, bias, dtype, _eight_bit)
    return _eight_bit(x, codes, scale, bias, dtype)


def linear_of_weights(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias` on the dequantized weight, `x` as it is. Arguments as in `linear`.

    Numerics:
        bfloat16 holds codes exactly, so they are multiplied as they are and the scale is applied to the sum: the weight
        is rounded once, to 8 bits, and not a second time. In float16 such sums could overflow: twice there.
    """
    if is_left_to_torch(x, codes):
        return by_torch(x, codes, scale, bias, dtype)
    if wants_gradient(x, bias) and not torch.compiler.is_compiling():  # traced, the operators have the right gradient
        return differentiable(x, codes, scale, bias, dtype, _of_weights)
    return _of_weights(x, codes, scale, bias, dtype)


def _eight_bit(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    # In as few operators as there are: at 32 rows their fixed costs are half of the time.
    rows = x if x.dim() == 2 else x.reshape(-1, codes.shape[1])
    if rows.dtype is not torch.float32:
        rows = rows.float()
    if not rows.is_contiguous():
        rows = rows.contiguous()
    magnitude = rows.abs()
    amax = magnitude.amax(1, True)
    # A row of zeros becomes NaN here and some code or other after; whichever, it is multiplied by an amax of 0 below.
    quantized = torch.mul(rows, _LARGEST / amax, out=magnitude).round_()
    y = kernels.multiply(quantized, codes, scale)
    if bias is None:
        y.mul_(amax.mul_(_STEP))
    else:
        torch.addcmul(bias if bias.dtype is torch.float32 else bias.float(), y, amax, value=_STEP, out=y)
    if x.dim() != 2:
        y = y.view(*x.shape[:-1], codes.shape[0])
    return y if dtype is torch.float32 else y.to(dtype)


def _eight_bit_traced(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same in operators that compile and export; elementwise ones, which inductor fuses, around one product."""
    rows = x.reshape(-1, codes.shape[1]).float()
    amax = rows.abs().amax(1, True).clamp_min(SMALLEST_AMAX)
    quantized = torch.round(rows * (torch.full_like(amax, 127.0) / amax))
    if torch.compiler.is_exporting():
        y = _exported_product(quantized, codes, scale)
    else:
        y = torch.ops.narrowcast.int8_product((quantized + 128.0).to(torch.uint8), codes, scale)
    y = y * (amax * _STEP)
    if bias is not None:
        y = y + bias.float()
    return in_shape_of(x, y).to(dtype)


def _exported_product(quantized: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Only operators that every PyTorch has, since an exported program runs without this library."""
    if codes.shape[1] > 1 and (codes.device.type == "cuda" or has_dot_product()):
        return torch._int_mm(quantized.to(torch.int8), codes.t()).float() * scale.reshape(-1)
    return torch.mm(quantized, codes.float().t()) * scale.reshape(-1)


def _of_weights(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows = x.reshape(-1, codes.shape[1])
    wide = torch.float32 if is_slow(codes, dtype) else dtype
    few = rows.shape[0] <= MAX_PACKED_ROWS and codes.shape[1] % PACKED_STEP == 0
    if few and dtype is torch.bfloat16 and codes.device.type == "cpu":
        # Its own scales would be bfloat16, so it gets ones.
        y = torch._weight_int8pack_mm(rows.to(dtype), codes, torch.ones_like(scale.reshape(-1), dtype=dtype)).float()
        y = y * scale.reshape(-1)
    elif wide is torch.float16:
        # Sums of products with codes, up to 127 times as large, would overflow.
        y = F.linear(rows.to(wide), dequantize(codes, scale, wide)).float()
    else:
        y = _product(rows.to(wide), codes)
        y = (y.float() if wide is torch.bfloat16 else y) * scale.reshape(-1)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return in_shape_of(x, y).to(dtype)


def _product(rows: Tensor, codes: Tensor) -> Tensor:
    if codes.numel() <= _BLOCK or torch.compiler.is_compiling():
        return F.linear(rows, codes.to(rows.dtype))
    y = rows.new_empty(rows.shape[0], codes.shape[0])
    step = max(_BLOCK // codes.shape[1], 1)
    floats = rows.new_empty(step, codes.shape[1])
    for begin in range(0, codes.shape[0], step):
        block = codes[begin : begin + step]
        torch.mm(rows, floats[: block.shape[0]].copy_(block).t(), out=y[:, begin : begin + step])
    return y


_LIBRARY = torch.library.Library("narrowcast", "DEF")  # type: ignore[no-untyped-call]


def _define(signature: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> str:
    name = f"narrowcast::{signature.partition('(')[0]}"
    _LIBRARY.define(signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    return name


# The product in a compiled graph; its codes are shifted by 128 and uint8, because inductor can write bytes as it fuses.
_define(
    "int8_product(Tensor codes, Tensor weight, Tensor scale) -> Tensor",
    kernels.multiply,
    lambda codes, weight, scale: scale.new_empty(codes.shape[0], weight.shape[0]),
)

# The whole layer in a compiled graph that will be differentiated.
_LINEAR = _define(
    "int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    lambda x, codes, scale, bias, dtype: _eight_bit(x, codes, scale, bias, dtype),
    lambda x, codes, scale, bias, dtype: x.new_empty(*x.shape[:-1], codes.shape[0], dtype=dtype),
)


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    x, codes, scale, bias, _ = inputs
    ctx.save_for_backward(codes, scale)
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: Tensor) -> Any:
    grad_x, grad_bias = gradients(grad, ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad)
    return grad_x, None, None, grad_bias, None


torch.library.register_autograd(_LINEAR, _linear_backward, setup_context=_keep_for_backward, lib=_LIBRARY)
