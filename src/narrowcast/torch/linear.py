"""`nn.Linear` under a float policy: one function of its parameters, so no shadow is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.torch.carried import Cast
from narrowcast.torch.gemm import is_slow

__all__ = ["LinearCast"]


class LinearCast(Cast):
    """A linear layer: input, weight and bias rounded to the compute dtype, which is also the dtype of the output.

    Numerics:
        Where the CPU multiplies the compute dtype slowly, the rounded values are multiplied in float32 and the result,
        bias included, is rounded once: within `in_features` float32 roundings of the exact sum, then half a unit in the
        last place of the compute dtype.
    """

    def _narrowcast_run(self, input: Tensor) -> Any:
        compute = self._narrowcast_compute
        weight, bias = self._narrowcast_narrow("weight"), self._narrowcast_narrow("bias")
        if input.dtype is not compute and input.is_floating_point():
            input = input.to(compute)
        if is_slow(weight, compute):
            wide = torch.float32
            bias = bias if bias is None else bias.to(wide)
            return F.linear(input.to(wide), weight.to(wide), bias).to(compute)
        return F.linear(input, weight, bias)
