"""Linear layers on 8-bit weights: `nn.Linear` and Hugging Face's `Conv1D`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member
from narrowcast.torch import int8_gemm
from narrowcast.torch.int8_plan import describe_int8, describe_weights
from narrowcast.torch.scheme import register
from narrowcast.torch.stored_weights import StoredScheme, StoredWeights

__all__ = ["InputsFirst", "Int8Linear", "Int8WeightLinear", "LinearScheme"]


class Int8Linear(StoredWeights):
    """A linear layer with 8-bit weights and activations quantized row by row as they come.

    Numerics:
        As `narrowcast.torch.int8_gemm.linear`. The input is cast to the compute dtype first, which is also the dtype of
        the output.
    """

    def _narrowcast_run(self, input: Tensor) -> Any:
        compute = self._narrowcast_compute
        if input.dtype is not compute and input.is_floating_point():
            input = input.to(compute)
        buffers = self._buffers  # type: ignore[attr-defined]
        return int8_gemm.linear(
            input, buffers["weight_codes"], buffers["weight_scale"], self._narrowcast_bias(), compute
        )


class Int8WeightLinear(StoredWeights):
    """A linear layer with 8-bit weights; activations stay floats.

    Numerics:
        As `narrowcast.torch.int8_gemm.linear_of_weights`.
    """

    def _narrowcast_run(self, input: Tensor) -> Any:
        compute = self._narrowcast_compute
        if input.dtype is not compute and input.is_floating_point():
            input = input.to(compute)
        buffers = self._buffers  # type: ignore[attr-defined]
        return int8_gemm.linear_of_weights(
            input, buffers["weight_codes"], buffers["weight_scale"], self._narrowcast_bias(), compute
        )


class InputsFirst(StoredWeights):
    """Hugging Face's `Conv1D` keeps its weight as (in, out)."""

    @staticmethod
    def _narrowcast_to_rows(module: Any, weight: Tensor) -> Tensor:
        return weight.t()

    @staticmethod
    def _narrowcast_from_rows(module: Any, weight: Tensor) -> Tensor:
        return weight.t()


class Int8Conv1D(InputsFirst, Int8Linear):
    """`Int8Linear` for `Conv1D`."""


class Int8WeightConv1D(InputsFirst, Int8WeightLinear):
    """`Int8WeightLinear` for `Conv1D`."""


class LinearScheme(StoredScheme):
    """Carries out modes that store weights as codes at linear layers.

    Args:
        carrier: the class for `nn.Linear`.
        inputs_first: the class for `Conv1D`.
        describe: what the plan says.
    """

    def __init__(self, carrier: type[StoredWeights], inputs_first: type[StoredWeights], describe: Any) -> None:
        self._outputs_first = carrier
        self._inputs_first = inputs_first
        self._words = describe

    def _carrier(self, base: type[nn.Module]) -> type[StoredWeights]:
        return self._outputs_first if issubclass(base, nn.Linear) else self._inputs_first

    def _rows(self, member: Member, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if member.detail("transposed") else shape

    def _describe(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str, int]:
        weights = [parameter for parameter in member.parameters if parameter.name == "weight"]
        found: tuple[str, str, int] = self._words(member, policy, device, weights)
        return found


register("int8", ["linear"], LinearScheme(Int8Linear, Int8Conv1D, describe_int8))
register("int8/weight", ["linear"], LinearScheme(Int8WeightLinear, Int8WeightConv1D, describe_weights))
