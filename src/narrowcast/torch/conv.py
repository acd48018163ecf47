"""Convolutions and transposed convolutions under a float policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.torch.carried import Cast
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.inputs import cast_floats

__all__ = ["ConvCast", "ConvTransposeCast"]


class ConvCast(Cast):
    """A convolution: input, weight and bias rounded to the compute dtype, which is also the dtype of the output.

    Numerics:
        As `LinearCast` where the CPU is slow in the compute dtype.
    """

    def _narrowcast_run(self, input: Tensor) -> Any:
        return _convolve(self, input, self._conv_forward)  # type: ignore[attr-defined]


class ConvTransposeCast(Cast):
    """A transposed convolution, as `ConvCast`."""

    def _narrowcast_run(self, input: Tensor, output_size: Any = None) -> Any:
        if self.padding_mode != "zeros":  # type: ignore[attr-defined]
            # PyTorch's own words and error for it.
            return self._narrowcast_base.forward(self, input, output_size)
        module: Any = self
        transposed, num_spatial_dims = _TRANSPOSED[self._narrowcast_base.forward]
        output_padding = module._output_padding(
            input,
            output_size,
            module.stride,
            module.padding,
            module.kernel_size,
            num_spatial_dims,
            module.dilation,
        )

        def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return transposed(
                input, weight, bias, module.stride, module.padding, output_padding, module.groups, module.dilation
            )

        return _convolve(self, input, forward)


_TRANSPOSED: dict[Any, tuple[Callable[..., Tensor], int]] = {
    nn.ConvTranspose1d.forward: (F.conv_transpose1d, 1),
    nn.ConvTranspose2d.forward: (F.conv_transpose2d, 2),
    nn.ConvTranspose3d.forward: (F.conv_transpose3d, 3),
}


def _convolve(module: Cast, input: Tensor, forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
    compute = module._narrowcast_compute
    weight, bias = module._narrowcast_narrow("weight"), module._narrowcast_narrow("bias")
    input = cast_floats(input, compute)
    if is_slow(weight, compute):
        wide = torch.float32
        bias = bias if bias is None else bias.to(wide)
        return forward(input.to(wide), weight.to(wide), bias).to(compute)
    return forward(input, weight, bias)
