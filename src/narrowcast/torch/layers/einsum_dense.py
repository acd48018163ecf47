"""`EinsumDense`: a kernel with any number of axes, by an equation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.cores import KernelLayer, as_floats
from narrowcast.torch.layers.einsum import Equation, Shapes, parse, shapes_of
from narrowcast.torch.layers.initializers import VarianceScaling
from narrowcast.torch.layers.variables import CoreVariable
from narrowcast.torch.shadow import KnownCast

__all__ = ["EinsumDense"]


class EinsumCore(nn.Module):
    """The product of an equation that is no matrix multiplication: with an axis in input, kernel and output."""

    _narrowcast_float_carrier = KnownCast

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input: Tensor, equation: str) -> Tensor:
        """Returns the product."""
        return torch.einsum(equation, input, self.weight)


class Offset(Layer):
    """A bias that the core cannot add: one with only some of the axes that come in, or with others."""

    def __init__(self, shape: tuple[int, ...], initializer: Any) -> None:
        super().__init__()
        self.bias = self.add_weight(shape, initializer, name="bias")

    def call(self, inputs: Tensor) -> Tensor:
        """Returns the sum."""
        return inputs + self.bias


def _kernel_to_keras(layer: Any, weight: Tensor) -> Tensor:
    equation, shapes = layer._equation, layer._shapes
    if not equation.is_linear:
        return weight
    labels = equation.new + equation.summed
    lengths = dict(zip(equation.kernel, shapes.kernel, strict=True))
    return weight.reshape([lengths[label] for label in labels]).permute([labels.index(x) for x in equation.kernel])


def _kernel_from_keras(layer: Any, kernel: Tensor) -> Tensor:
    equation = layer._equation
    if not equation.is_linear:
        return kernel
    rows = kernel.permute([equation.kernel.index(label) for label in equation.new + equation.summed])
    num_new = len(equation.new)
    return rows.reshape(math.prod(rows.shape[:num_new]), math.prod(rows.shape[num_new:]))


class _Bias(CoreVariable):
    """The bias, wherever it stands."""

    def __get__(self, layer: Any, owner: type) -> Any:
        offset = None if layer is None else layer._modules.get("offset")
        return super().__get__(layer, owner) if offset is None else offset.bias

    def __set__(self, layer: Any, value: Any) -> None:
        offset = layer._modules.get("offset")
        if offset is None:
            super().__set__(layer, value)
        else:
            offset.set_weights([value])


@builtin()
class EinsumDense(KernelLayer):
    """`activation(einsum(equation, inputs, kernel) + bias)`.

    Its core is an `nn.Linear` between two rearrangements of axes, which is what equations of the layers of transformers
    are. Equations with an axis that input, kernel and output have in common are computed as they stand, and have no
    quantized form.

    Args:
        equation: `ab,bc->ac`, `...ab,bc->...ac` or `ab...,bc->ac...`, in any letters.
        output_shape: the lengths of the output without the batch and the axes of an ellipsis; `None` for those that the
            input says.
        activation: see `KernelLayer`.
        bias_axes: the labels of the output that the bias has; `None` for no bias.
        kernel_initializer: for the kernel, whose axes the equation says.
        bias_initializer: for the bias.
        kernel_regularizer: see `KernelLayer`.
        bias_regularizer: see `KernelLayer`.
        kwargs: those of `KernelLayer` and of `Layer`.

    Example:
        >>> layer = EinsumDense("abc,cde->abde", output_shape=(None, 4, 8), bias_axes="de")
        >>> layer(torch.ones(2, 5, 32)).shape, layer.kernel.shape, layer.bias.shape
        (torch.Size([2, 5, 4, 8]), torch.Size([32, 4, 8]), torch.Size([4, 8]))
    """

    variable_names = ("kernel", "bias")
    kernel = CoreVariable("weight", _kernel_to_keras, _kernel_from_keras)
    bias = _Bias("bias", lambda layer, value: value.reshape(layer._shapes.bias), lambda layer, value: value.reshape(-1))
    _equation: Equation
    _shapes: Shapes

    def __init__(
        self,
        equation: str,
        output_shape: Any,
        activation: Any = None,
        bias_axes: str | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        gptq_unpacked_column_size: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            activation,
            bias_axes is not None,
            kernel_initializer,
            bias_initializer,
            kernel_regularizer,
            bias_regularizer,
            **kwargs,
        )
        self.equation = equation
        self.partial_output_shape = (output_shape,) if isinstance(output_shape, int) else tuple(output_shape)
        self.bias_axes = bias_axes

    def build(self, input_shape: Any) -> None:
        """Makes the kernel and the bias; the lengths of the axes that are summed over must be known."""
        if not isinstance(input_shape, tuple):
            raise LayerError(
                f"EinsumDense at {self.path!r} takes one tensor", got={"input_shape": input_shape}, expected="its shape"
            )
        self._equation = equation = parse(self.equation, len(input_shape))
        self._shapes = shapes = shapes_of(self.equation, self.bias_axes, input_shape, self.partial_output_shape)
        initializer = self.kernel_initializer
        if isinstance(initializer, VarianceScaling):
            initializer = initializer.with_axes(shapes.input_axes, shapes.output_axes)
        kernel = self._new(initializer, shapes.kernel, lambda values: _kernel_from_keras(self, values))
        bias = None
        if shapes.bias is not None and shapes.has_plain_bias and equation.is_linear:
            bias = self._new(self.bias_initializer, shapes.bias, Tensor.flatten)
        elif shapes.bias is not None:
            self.offset = Offset(shapes.bias, self.bias_initializer)
            self.offset.build()
        if equation.is_linear:
            core = nn.Linear(kernel.shape[1], kernel.shape[0], bias=False, device="meta")
            core.weight = kernel
            core.bias = bias  # type: ignore[assignment]
            self.core = core
        else:
            self.core = EinsumCore(kernel)

    def call(self, inputs: Any) -> Any:
        """Returns the outputs in the compute dtype."""
        x = as_floats(self, inputs)
        equation = self._equation
        if x.dim() != len(equation.input):
            equation = parse(self.equation, x.dim())
        if not equation.is_linear:
            y = self.core(x, equation.text)
        else:
            if equation.to_rows is not None:
                x = x.permute(equation.to_rows)
            if len(equation.summed) > 1:
                x = x.reshape(*x.shape[: equation.num_batch], self.core.in_features)
            y = self.core(x)
            if len(equation.new) > 1:
                lengths = dict(zip(self._equation.kernel, self._shapes.kernel, strict=True))
                y = y.reshape(*y.shape[:-1], *[lengths[label] for label in equation.new])
            if equation.from_rows is not None:
                y = y.permute(equation.from_rows)
        if "offset" in self._modules:
            y = self.offset(y)
        return self._activated(y)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return shapes_of(self.equation, None, input_shape, self.partial_output_shape).output

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "equation": self.equation,
            "output_shape": list(self.partial_output_shape),
            "bias_axes": self.bias_axes,
            **self._kernel_config(bias=False),
        }
