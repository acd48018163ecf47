"""Multiplying float8 values: real float8 GEMMs where the device has them, the same values emulated elsewhere.

Names of axes: r row (token), i inner, o output channel.

An *engine* rounds operands and multiplies them. All engines round to the same float8 values; they differ in what holds
them and in the order of the float32 sums. `scale_inv` of an operand is one number, or one a row of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.dtype_policies import dtypes
from narrowcast.numerics.scaling import LARGEST_FLOAT32
from narrowcast.torch.float8_rounding import Format, Number, is_read_free, round_to
from narrowcast.torch.gemm import SLOW_ON_CPU

__all__ = [
    "EMULATED",
    "REAL",
    "Engine",
    "Real",
    "ScaledOutput",
    "Wide",
    "engine_for",
    "has_float8_gemm",
    "learn_devices",
]

_SMALLEST_NORMAL = dtypes.get("float32").smallest_normal
MULTIPLE = 16
"""The inner and the output axis of a real float8 GEMM are multiples of this (cuBLASLt)."""


class Engine(ABC):
    """Rounds operands to float8 and multiplies them. Stateless.

    Products are written for the three GEMMs of a linear layer `y_ro = x_ri @ weight_oi.T + bias_o`. Each operand comes
    rounded, with the factor that its codes are to be multiplied by: of no axes, or along its rows.

    `keeps_weight` says whether the rounded weight is kept from forward to backward. Otherwise it is rounded again, and
    no copy of every weight lies in memory meanwhile.
    """

    keeps_weight = False

    @abstractmethod
    def quantize(
        self, x: Tensor, scale: Number, to: Format, *, clip: bool = True, scratch: str | None = None
    ) -> Tensor:
        """Returns `x * scale` rounded to float8, in whatever dtype this engine multiplies; see `round_to`."""

    @abstractmethod
    def stored(self, codes: Tensor) -> Tensor:
        """Returns float8 codes as an operand, in whatever dtype this engine multiplies."""

    @abstractmethod
    def forward(
        self, x: Tensor, weight: Tensor, x_inv: Number, weight_inv: Number, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Returns `x_ri @ weight_oi.T + bias`; `x_inv` along r, `weight_inv` along o."""

    @abstractmethod
    def grad_input(
        self, grad: Tensor, weight: Tensor, grad_inv: Number, weight_inv: Number, dtype: torch.dtype
    ) -> Tensor:
        """Returns `grad_ro @ weight_oi`; `grad_inv` along r, `weight_inv` along i."""

    @abstractmethod
    def grad_weight(self, grad: Tensor, x: Tensor, grad_inv: Number, x_inv: Number, dtype: torch.dtype) -> Tensor:
        """Returns `grad_ro.T @ x_ri`; `grad_inv` along o, `x_inv` along i."""


class Wide(Engine):
    """Float8 values held and multiplied in float32; exact products, float32 sums.

    Factors that are numbers cost nothing: the multiplication itself takes one. Others of whole tensors go into the
    weight, which is smaller than the activations.
    """

    keeps_weight = True

    def quantize(
        self, x: Tensor, scale: Number, to: Format, *, clip: bool = True, scratch: str | None = None
    ) -> Tensor:
        """See `Engine.quantize`."""
        return round_to(x, scale, to, clip=clip, scratch=scratch)

    def stored(self, codes: Tensor) -> Tensor:
        """See `Engine.stored`."""
        return codes.float()

    def forward(
        self, x: Tensor, weight: Tensor, x_inv: Number, weight_inv: Number, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `Engine.forward`."""
        bias = None if bias is None else bias.float()
        factors = _two_numbers(x_inv, weight_inv)
        if factors is not None:
            return _scaled_product(x, weight.t(), factors, bias).to(dtype)
        x_inv, weight_inv = _along_rows(x_inv), _along_rows(weight_inv)
        if x_inv.numel() == 1:
            return F.linear(x, weight * (x_inv * weight_inv), bias).to(dtype)
        y = F.linear(x, weight * weight_inv)
        return (y * x_inv if bias is None else torch.addcmul(bias, y, x_inv)).to(dtype)

    def grad_input(
        self, grad: Tensor, weight: Tensor, grad_inv: Number, weight_inv: Number, dtype: torch.dtype
    ) -> Tensor:
        """See `Engine.grad_input`."""
        factors = _two_numbers(grad_inv, weight_inv)
        if factors is not None:
            return _scaled_product(grad, weight, factors).to(dtype)
        grad_inv, weight_inv = _along_rows(grad_inv), _along_rows(weight_inv).t()
        if grad_inv.numel() == 1:
            return torch.mm(grad, weight * (grad_inv * weight_inv)).to(dtype)
        return torch.mm(grad, weight * weight_inv).mul_(grad_inv).to(dtype)

    def grad_weight(self, grad: Tensor, x: Tensor, grad_inv: Number, x_inv: Number, dtype: torch.dtype) -> Tensor:
        """See `Engine.grad_weight`."""
        factors = _two_numbers(grad_inv, x_inv)
        if factors is not None:
            return _scaled_product(grad.t(), x, factors).to(dtype)
        return torch.mm(grad.t(), x).mul_(_along_rows(grad_inv) * _along_rows(x_inv).t()).to(dtype)


def _two_numbers(a_inv: Number, b_inv: Number) -> tuple[float, float] | None:
    """Two factors of whole tensors as numbers, if reading them costs nothing."""
    if isinstance(a_inv, Tensor) and isinstance(b_inv, Tensor):
        if a_inv.numel() == b_inv.numel() == 1 and is_read_free(a_inv):
            return a_inv.item(), b_inv.item()
        return None
    return float(a_inv), float(b_inv)


def _along_rows(inverse: Number) -> Tensor:
    """A factor as a column, one number for each row or for all."""
    if isinstance(inverse, Tensor):
        return inverse.reshape(-1, 1)
    return torch.tensor([[inverse]], dtype=torch.float32, device="cpu")  # numbers are of tensors of the CPU


def _scaled_product(a: Tensor, b: Tensor, factors: tuple[float, float], bias: Tensor | None = None) -> Tensor:
    """Returns `a @ b * factors[0] * factors[1] + bias`."""
    alpha, rest = factors[0] * factors[1], 1.0
    if math.isnan(alpha):  # `addmm` takes no notice of it
        return a.new_full((a.shape[0], b.shape[1]), alpha)
    if not _SMALLEST_NORMAL <= alpha <= LARGEST_FLOAT32:  # no float32, while what it is multiplied with may make it one
        alpha, rest = factors
    if bias is not None and rest == 1.0:
        return torch.addmm(bias, a, b, alpha=alpha)
    # `mm` takes no factor; what is multiplied by a beta of 0 is not read.
    y = torch.addmm(a.new_empty(1), a, b, beta=0.0, alpha=alpha)
    if rest != 1.0:
        y.mul_(rest)
    return y if bias is None else y.add_(bias)


class ScaledOutput(Engine):
    """Float8 values held in bfloat16, which holds all of them, and multiplied by its tensor cores or instructions.

    On CUDA the sums come back in float32. A CPU rounds them to bfloat16 before the factors are applied.
    """

    def quantize(
        self, x: Tensor, scale: Number, to: Format, *, clip: bool = True, scratch: str | None = None
    ) -> Tensor:
        """See `Engine.quantize`."""
        return round_to(x, scale, to, clip=clip, scratch="narrowed").to(torch.bfloat16)

    def stored(self, codes: Tensor) -> Tensor:
        """See `Engine.stored`."""
        return codes.to(torch.bfloat16)

    def forward(
        self, x: Tensor, weight: Tensor, x_inv: Number, weight_inv: Number, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `Engine.forward`."""
        y, inv = _mm(x, weight.t()), _along_rows(x_inv) * _along_rows(weight_inv).t()
        return (y * inv if bias is None else torch.addcmul(bias.float(), y, inv)).to(dtype)

    def grad_input(
        self, grad: Tensor, weight: Tensor, grad_inv: Number, weight_inv: Number, dtype: torch.dtype
    ) -> Tensor:
        """See `Engine.grad_input`."""
        return (_mm(grad, weight) * (_along_rows(grad_inv) * _along_rows(weight_inv).t())).to(dtype)

    def grad_weight(self, grad: Tensor, x: Tensor, grad_inv: Number, x_inv: Number, dtype: torch.dtype) -> Tensor:
        """See `Engine.grad_weight`."""
        return (_mm(grad.t(), x) * (_along_rows(grad_inv) * _along_rows(x_inv).t())).to(dtype)


class Real(Engine):
    """Float8 codes multiplied by `torch._scaled_mm`: tensor cores, float32 sums, one rounding to the result's dtype.

    Factors of rows come with results in bfloat16 only. The second operand has to lie column by column, so the backward
    products copy one operand, at a byte an element.
    """

    def quantize(
        self, x: Tensor, scale: Number, to: Format, *, clip: bool = True, scratch: str | None = None
    ) -> Tensor:
        """See `Engine.quantize`. Always clips: what a bare cast does to large values differs between versions."""
        return (x.float() * scale).clamp(-to.largest, to.largest).to(to.dtype)

    def stored(self, codes: Tensor) -> Tensor:
        """See `Engine.stored`."""
        return codes

    def forward(
        self, x: Tensor, weight: Tensor, x_inv: Number, weight_inv: Number, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `Engine.forward`. The only product that may add in fewer bits (`use_fast_accum`), as is usual."""
        x_inv, weight_inv = _row_factors(x_inv, weight_inv)
        is_fused = bias is not None and dtype is not torch.float32
        y = torch._scaled_mm(
            x.contiguous(),
            weight.contiguous().t(),
            scale_a=x_inv,
            scale_b=weight_inv,
            bias=bias.to(dtype) if bias is not None and is_fused else None,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return y if bias is None or is_fused else y + bias.to(dtype)

    def grad_input(
        self, grad: Tensor, weight: Tensor, grad_inv: Number, weight_inv: Number, dtype: torch.dtype
    ) -> Tensor:
        """See `Engine.grad_input`."""
        grad_inv, weight_inv = _row_factors(grad_inv, weight_inv)
        return torch._scaled_mm(
            grad.contiguous(), weight.t().contiguous().t(), scale_a=grad_inv, scale_b=weight_inv, out_dtype=dtype
        )

    def grad_weight(self, grad: Tensor, x: Tensor, grad_inv: Number, x_inv: Number, dtype: torch.dtype) -> Tensor:
        """See `Engine.grad_weight`. Rows are filled up with zeros to a multiple that the GEMM takes."""
        grad_inv, x_inv = _row_factors(grad_inv, x_inv)
        missing = -grad.shape[0] % MULTIPLE
        grad_t, x_t = _padded(grad.t(), missing), _padded(x.t(), missing)
        return torch._scaled_mm(grad_t, x_t.t(), scale_a=grad_inv, scale_b=x_inv, out_dtype=dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def _row_factors(a_inv: Number, b_inv: Number) -> tuple[Tensor, Tensor]:
    """The factors as `_scaled_mm` takes them: both single numbers, or a column and a row."""
    a_inv, b_inv = _along_rows(a_inv), _along_rows(b_inv)
    if a_inv.numel() == b_inv.numel() == 1:
        return a_inv.reshape(()), b_inv.reshape(())
    return a_inv.contiguous(), b_inv.t().contiguous()


def _padded(codes: Tensor, missing: int) -> Tensor:
    """Codes with `missing` zero columns more, contiguous; through bytes, because float8 tensors cannot be padded."""
    if not missing:
        return codes.contiguous()
    return F.pad(codes.contiguous().view(torch.uint8), (0, missing)).view(codes.dtype)


WIDE, SCALED_OUTPUT, REAL = Wide(), ScaledOutput(), Real()
EMULATED = (WIDE, SCALED_OUTPUT)

_REAL_DEVICES: dict[str, bool] = {"cpu": False, "meta": False}
"""By type of device, whether its float8 GEMM is used. The CPU has `_scaled_mm` too, emulated and slower than `Wide`."""


def learn_devices() -> None:
    """Asks once which devices have float8 GEMMs; a plain table afterwards, which `torch.compile` reads as constants."""
    if "cuda" not in _REAL_DEVICES and torch.cuda.is_available():
        _REAL_DEVICES["cuda"] = _cuda_has_float8()


@lru_cache(maxsize=1)
def _cuda_has_float8() -> bool:
    # AMD's first float8 GPUs have other formats (fnuz); they are emulated.
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def has_float8_gemm(device: str) -> bool:
    """Says whether a device (`cuda`, `cuda:1`, `cpu`) runs real float8 GEMMs.

    Example:
        >>> has_float8_gemm("cpu")
        False
    """
    learn_devices()
    return _REAL_DEVICES.get(device.partition(":")[0], False)


def engine_for(x: Tensor, weight: Tensor, dtype: torch.dtype, *, by_row: bool) -> Engine:
    """Returns the engine for a product of `x_ri` and `weight_oi` with results in `dtype`.

    Args:
        x: the input.
        weight: the weight.
        dtype: the dtype of the results.
        by_row: whether factors come by row.
    """
    device = x.device.type
    if (
        _REAL_DEVICES.get(device, False)
        and dtype in ((torch.bfloat16,) if by_row else (torch.bfloat16, torch.float16, torch.float32))
        and weight.shape[0] % MULTIPLE == 0
        and weight.shape[1] % MULTIPLE == 0
    ):
        return REAL
    # Sums of raw float8 values do not fit in float16; float32 results are not to be rounded to bfloat16 on the way.
    is_fast = device == "cuda" or (device == "cpu" and dtype is torch.bfloat16 and torch.bfloat16 not in SLOW_ON_CPU)
    return SCALED_OUTPUT if is_fast else WIDE
