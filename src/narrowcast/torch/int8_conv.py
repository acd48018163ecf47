"""Convolutions on 8-bit weights, one scale for each output channel; the arithmetic stays float."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member
from narrowcast.torch.conv import ConvCast, ConvTransposeCast
from narrowcast.torch.gemm import describe_gemm
from narrowcast.torch.int8_plan import describe_weights_only
from narrowcast.torch.scheme import register
from narrowcast.torch.stored_weights import StoredScheme, StoredWeights

__all__ = ["Int8Conv", "Int8ConvTranspose"]


class Int8Conv(StoredWeights, ConvCast):
    """A convolution whose weight is dequantized at each call, in the compute dtype.

    Numerics:
        That of the convolution on `weight`.
    """


class Int8ConvTranspose(StoredWeights, ConvTransposeCast):
    """A transposed convolution. Its codes stand output channels first, unlike its weight.

    The weight is (in, out / groups, ...), its groups along the first axis; the codes are (out, in / groups, ...).
    """

    @staticmethod
    def _narrowcast_to_rows(module: Any, weight: Tensor) -> Tensor:
        return _exchange(weight, module.groups)

    @staticmethod
    def _narrowcast_from_rows(module: Any, weight: Tensor) -> Tensor:
        return _exchange(weight, module.groups)


def _exchange(weight: Tensor, num_groups: int) -> Tensor:
    """From (g * a, b, ...) to (g * b, a, ...); its own inverse."""
    first, second, *kernel = weight.shape
    grouped = weight.reshape(num_groups, first // num_groups, second, *kernel)
    return grouped.transpose(1, 2).reshape(num_groups * second, first // num_groups, *kernel)


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ConvScheme(StoredScheme):
    """Carries out `int8` and `int8/weight`, which are the same at convolutions.

    Args:
        is_told: whether plans say that only weights are quantized, as the mode's name does not.
    """

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told

    def _carrier(self, base: type[nn.Module]) -> type[StoredWeights]:
        return Int8ConvTranspose if issubclass(base, _TRANSPOSED) else Int8Conv

    def _rows(self, member: Member, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not member.detail("transposed"):
            return shape
        num_groups = member.detail("groups", 1)
        return (shape[1] * num_groups, shape[0] // num_groups, *shape[2:])

    def _describe(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str, int]:
        gemm = describe_gemm(str(policy.compute_dtype), device, widens=True).replace("gemm", "convolution")
        return describe_weights_only(gemm, is_told=self._is_told)


register("int8", ["conv"], ConvScheme(is_told=True))
register("int8/weight", ["conv"], ConvScheme(is_told=False))
