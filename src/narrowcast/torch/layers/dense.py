"""`Dense`: every output is a weighted sum of all inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers.configs import positive
from narrowcast.torch.layers.cores import KernelLayer, as_floats
from narrowcast.torch.layers.shapes import axis_length
from narrowcast.torch.layers.variables import CoreVariable

__all__ = ["Dense"]


def _transposed(layer: Any, value: Tensor) -> Tensor:
    return value.t()


@builtin()
class Dense(KernelLayer):
    """`activation(inputs @ kernel + bias)`, along the last axis. Its core is an `nn.Linear`.

    Whole numbers and bools are cast to the compute dtype first.

    Args:
        units: the length of the last axis of the output.
        activation: see `KernelLayer`.
        use_bias: see `KernelLayer`.
        kernel_initializer: for the kernel, shape `(inputs, units)`.
        bias_initializer: for the bias, shape `(units,)`.
        kernel_regularizer: see `KernelLayer`.
        bias_regularizer: see `KernelLayer`.
        activity_regularizer: a penalty on the outputs.
        kwargs: those of `KernelLayer` and of `Layer`.

    Numerics:
        As the scheme of its policy computes `nn.Linear`: in float32 where the CPU multiplies the compute dtype slowly,
        rounded once.

    Example:
        >>> import torch
        >>> layer = Dense(10, dtype="mixed_bfloat16")
        >>> layer(torch.ones(2, 4)).shape, layer.kernel.shape
        (torch.Size([2, 10]), torch.Size([4, 10]))
    """

    variable_names = ("kernel", "bias")
    kernel = CoreVariable("weight", _transposed, _transposed)
    bias = CoreVariable("bias")

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            activation,
            use_bias,
            kernel_initializer,
            bias_initializer,
            kernel_regularizer,
            bias_regularizer,
            activity_regularizer=activity_regularizer,
            **kwargs,
        )
        self.units = positive("units", units)

    def build(self, input_shape: Any) -> None:
        """Makes the kernel and the bias; the last axis of the shape must be known."""
        length = axis_length(self, input_shape, -1)
        kernel = self._new(self.kernel_initializer, (length, self.units), Tensor.t)
        bias = self._new(self.bias_initializer, (self.units,)) if self.use_bias else None
        core = nn.Linear(length, self.units, bias=False, device="meta")
        core.weight = kernel
        core.bias = bias  # type: ignore[assignment]
        self.core = core

    def _check_build_again(self, given: Any) -> None:
        shape = given.get("input_shape")
        if shape and shape[-1] is not None and shape[-1] != self.core.in_features:
            raise LayerError(
                f"Dense at {self.path!r} is built for other inputs already",
                got={"input_shape": shape},
                expected=f"{self.core.in_features} on the last axis",
                fix="Make another layer",
            )

    def call(self, inputs: Any) -> Any:
        """Returns the outputs, shape `(..., units)`, in the compute dtype."""
        # As `self.core(...)`, past the look-up of attributes, which takes a microsecond.
        return self._activated(self._modules["core"](as_floats(self, inputs)))  # type: ignore[misc]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {**super().get_config(), "units": self.units, **self._kernel_config()}
