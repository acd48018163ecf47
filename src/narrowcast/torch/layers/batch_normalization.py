"""`BatchNormalization`: each channel brought to one scale, by the batch in training, by what was seen after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import LayerError, UnsupportedError
from narrowcast.serialization import builtin, serialize
from narrowcast.torch.layers import initializers, regularizers
from narrowcast.torch.layers.carrying import is_empty
from narrowcast.torch.layers.configs import number, refuse
from narrowcast.torch.layers.cores import CoreLayer
from narrowcast.torch.layers.normalization import wide
from narrowcast.torch.layers.shapes import axis_length
from narrowcast.torch.layers.variables import CoreVariable

__all__ = ["BatchNormalization"]


class BatchNorm(nn.Module):
    """The arithmetic of `BatchNormalization`.

    PyTorch's own module counts the other way round (its momentum is one minus Keras'), has the channels in axis 1 and
    keeps an unbiased variance, so it is not this layer's core.
    """

    _narrowcast_kind = "norm"
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, axis: int, momentum: float, epsilon: float) -> None:
        super().__init__()
        self.axis, self.momentum, self.epsilon = axis, momentum, epsilon

    def forward(self, x: Tensor, mask: Tensor | None = None, by_batch: bool = False) -> Tensor:
        """Returns the normalized input; keeps the batch's statistics where it goes by them."""
        shape = [1] * x.dim()
        shape[self.axis] = x.shape[self.axis]
        if by_batch:
            mean, variance = self._moments(x, mask)
            with torch.no_grad():
                for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
                    kept.lerp_(new.detach().to(kept.dtype), 1 - self.momentum)
        else:
            mean, variance = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        gain = torch.rsqrt(variance + self.epsilon)
        gain = gain if self.weight is None else gain * self.weight
        y = (x - mean.view(shape)) * gain.view(shape)
        return y if self.bias is None else y + self.bias.view(shape)

    def _moments(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rest = [axis for axis in range(x.dim()) if axis != self.axis % x.dim()]
        if mask is None:
            variance, mean = torch.var_mean(x, rest, correction=0)
            return mean, variance
        kept = mask.unsqueeze(-1).expand(x.shape)
        count = kept.sum(rest).clamp(min=1)
        mean = torch.where(kept, x, 0).sum(rest) / count
        shape = [1] * x.dim()
        shape[self.axis] = x.shape[self.axis]
        variance = torch.where(kept, x - mean.view(shape), 0).square().sum(rest) / count
        return mean, variance


@builtin()
class BatchNormalization(CoreLayer):
    """`(x - mean) / sqrt(variance + epsilon) * gamma + beta` for each channel.

    In training, mean and variance are those of the batch, and `moving_mean` and `moving_variance` follow them:
    `moving = momentum * moving + (1 - momentum) * batch`. Otherwise, and where `trainable` is false, the moving ones
    are used.

    Args:
        axis: the axis of the channels.
        momentum: how much of the moving statistics stays at each batch, 0 to 1.
        epsilon: a small number against division by zero.
        center: whether there is a `beta`.
        scale: whether there is a `gamma`.
        beta_initializer: for `beta`, shape `(channels,)`.
        gamma_initializer: for `gamma`.
        moving_mean_initializer: for `moving_mean`.
        moving_variance_initializer: for `moving_variance`.
        beta_regularizer: a penalty on `beta`.
        gamma_regularizer: a penalty on `gamma`.
        beta_constraint: not supported.
        gamma_constraint: not supported.
        renorm: not supported.
        renorm_clipping: without `renorm` it means nothing.
        renorm_momentum: without `renorm` it means nothing.
        synchronized: not supported.
        kwargs: those of `Layer`.

    Numerics:
        In float32 at least, from the input as it comes. The moving statistics are float32 (float64 where the variable
        dtype was when they were made) whatever the policy: a variance leaves the range of float16 where its values do
        not.
    """

    variable_names = ("gamma", "beta", "moving_mean", "moving_variance")
    gamma = CoreVariable("weight")
    beta = CoreVariable("bias")
    moving_mean = CoreVariable("running_mean")
    moving_variance = CoreVariable("running_var")

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        moving_mean_initializer: Any = "zeros",
        moving_variance_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        renorm: bool = False,
        renorm_clipping: Any = None,
        renorm_momentum: float = 0.99,
        synchronized: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        refuse("constraint", beta_constraint)
        refuse("constraint", gamma_constraint)
        for name, value in (("renorm", renorm), ("synchronized", synchronized)):
            if value:
                raise UnsupportedError(f"Argument {name} of BatchNormalization is not supported", got={name: value})
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise LayerError(
                "Axis of BatchNormalization is not usable", got={"axis": axis}, expected="one whole number"
            )
        self.axis = axis
        self.momentum, self.epsilon = number("momentum", momentum, most=1), number("epsilon", epsilon)
        self.center, self.scale = bool(center), bool(scale)
        self.beta_initializer = initializers.get(beta_initializer)
        self.gamma_initializer = initializers.get(gamma_initializer)
        self.moving_mean_initializer = initializers.get(moving_mean_initializer)
        self.moving_variance_initializer = initializers.get(moving_variance_initializer)
        self.beta_regularizer = regularizers.get(beta_regularizer)
        self.gamma_regularizer = regularizers.get(gamma_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Makes the variables; the length of the axis must be known."""
        shape = (axis_length(self, input_shape, self.axis),)
        core = BatchNorm(self.axis, self.momentum, self.epsilon)
        core.weight = self._new(self.gamma_initializer, shape) if self.scale else None
        core.bias = self._new(self.beta_initializer, shape) if self.center else None
        for name, initializer in (
            ("running_mean", self.moving_mean_initializer),
            ("running_var", self.moving_variance_initializer),
        ):
            dtype = "float64" if self._variable_dtype() == "float64" else "float32"
            core.register_buffer(name, torch.empty(shape) if is_empty() else initializer(shape, dtype=dtype))
        self.core = core

    def call(self, inputs: Any, training: bool | None = None, mask: Tensor | None = None) -> Any:
        """Returns the outputs, of the shape of the inputs, in the compute dtype.

        Args:
            inputs: of any rank.
            training: whether to go by the batch; `module.training` where it is not given.
            mask: bools of the shape of the inputs without their last axis: which positions count in the statistics.
        """
        by_batch = bool(training) and self.trainable
        return self.core(wide(self, inputs), None if mask is None else mask.bool(), by_batch)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        parts = ("beta_initializer", "gamma_initializer", "moving_mean_initializer", "moving_variance_initializer")
        return {
            **super().get_config(),
            "axis": self.axis,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "center": self.center,
            "scale": self.scale,
            **{part: serialize(getattr(self, part)) for part in (*parts, "beta_regularizer", "gamma_regularizer")},
        }
