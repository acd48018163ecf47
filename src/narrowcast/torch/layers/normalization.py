"""`LayerNormalization` and `RMSNormalization`: each example is brought to one scale by its own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from narrowcast.errors import LayerError, UnsupportedError
from narrowcast.serialization import builtin, serialize
from narrowcast.torch.layers import initializers, regularizers
from narrowcast.torch.layers.configs import number, refuse
from narrowcast.torch.layers.cores import CoreLayer
from narrowcast.torch.layers.shapes import axis_length
from narrowcast.torch.layers.variables import CoreVariable

__all__ = ["LayerNormalization", "RMSNormalization", "wide"]


def wide(layer: Any, x: Any) -> Tensor:
    """Returns whole numbers as float32, and floats as they are: norms cast for themselves, and not to fewer digits.

    Raises:
        LayerError: `x` is not a tensor.
    """
    if not isinstance(x, Tensor):
        raise LayerError(
            f"Input of {type(layer).__name__} at {layer.path!r} is not a tensor",
            got={"type": type(x).__name__},
            expected="a tensor, a NumPy array or a list of numbers",
        )
    return x if x.is_floating_point() or x.is_complex() else x.float()


class _AxesNorm(CoreLayer):
    """A norm over some axes, whose core normalizes the last ones."""

    def _take_axis(self, axis: Any) -> None:
        is_list = isinstance(axis, list | tuple)
        if not all(isinstance(a, int) and not isinstance(a, bool) for a in (axis if is_list else [axis])):
            raise TypeError(f"Axis of a norm is not usable. Got axis={axis!r}. Expected a whole number, or several.")
        self.axis = list(axis) if is_list else axis

    def _axes(self, rank: int) -> list[int]:
        """The axes in order, counted from the end."""
        given = self.axis if isinstance(self.axis, list) else [self.axis]
        if any(not -rank <= axis < rank for axis in given):
            raise LayerError(
                f"{type(self).__name__} at {self.path!r} has an axis that its input has not",
                got={"axis": self.axis, "rank": rank},
                expected=f"axes from {-rank} to {rank - 1}",
            )
        return sorted(axis - rank if axis >= 0 else axis for axis in given)

    def _lengths(self, input_shape: Any) -> tuple[int, ...]:
        axis_length(self, input_shape, -1)  # it is one tensor's shape
        return tuple(axis_length(self, input_shape, axis) for axis in self._axes(len(input_shape)))

    def _normalized(self, inputs: Any) -> Tensor:
        x = wide(self, inputs)
        axes = self._axes(x.dim())
        last = list(range(-len(axes), 0))
        if axes == last:
            return self.core(x)  # type: ignore[no-any-return]
        return self.core(x.movedim(axes, last)).movedim(last, axes)  # type: ignore[no-any-return]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        self._axes(len(input_shape))
        return tuple(input_shape)


@builtin()
class LayerNormalization(_AxesNorm):
    """`(x - mean) / sqrt(variance + epsilon) * gamma + beta`, mean and variance over some axes of each example.

    Its core is an `nn.LayerNorm`.

    Args:
        axis: the axis or axes that are normalized.
        epsilon: a small number against division by zero.
        center: whether there is a `beta`.
        scale: whether there is a `gamma`.
        beta_initializer: for `beta`, whose axes are those of `axis`.
        gamma_initializer: for `gamma`.
        beta_regularizer: a penalty on `beta`.
        gamma_regularizer: a penalty on `gamma`.
        beta_constraint: not supported.
        gamma_constraint: not supported.
        rms_scaling: not supported; see `RMSNormalization`.
        kwargs: those of `Layer`.

    Numerics:
        In float32 at least, from the input as it comes: values above the range of the compute dtype do no harm. The
        result is rounded to the compute dtype once.
    """

    variable_names = ("gamma", "beta")
    gamma = CoreVariable("weight")
    beta = CoreVariable("bias")

    def __init__(
        self,
        axis: int | Sequence[int] = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        rms_scaling: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        refuse("constraint", beta_constraint)
        refuse("constraint", gamma_constraint)
        if rms_scaling:
            raise UnsupportedError("Argument rms_scaling is not supported", fix="Use RMSNormalization")
        self._take_axis(axis)
        self.epsilon, self.center, self.scale = number("epsilon", epsilon), bool(center), bool(scale)
        self.beta_initializer = initializers.get(beta_initializer)
        self.gamma_initializer = initializers.get(gamma_initializer)
        self.beta_regularizer = regularizers.get(beta_regularizer)
        self.gamma_regularizer = regularizers.get(gamma_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Makes `gamma` and `beta`; the lengths of the axes must be known."""
        lengths = self._lengths(input_shape)
        core = nn.LayerNorm(lengths, eps=self.epsilon, elementwise_affine=False)
        core.elementwise_affine = self.scale or self.center
        core.weight = self._new(self.gamma_initializer, lengths) if self.scale else None  # type: ignore[assignment]
        core.bias = self._new(self.beta_initializer, lengths) if self.center else None  # type: ignore[assignment]
        self.core = core

    def call(self, inputs: Any) -> Any:
        """Returns the outputs, of the shape of the inputs, in the compute dtype."""
        return self._normalized(inputs)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "axis": self.axis,
            "epsilon": self.epsilon,
            "center": self.center,
            "scale": self.scale,
            "beta_initializer": serialize(self.beta_initializer),
            "gamma_initializer": serialize(self.gamma_initializer),
            "beta_regularizer": serialize(self.beta_regularizer),
            "gamma_regularizer": serialize(self.gamma_regularizer),
        }


@builtin()
class RMSNormalization(_AxesNorm):
    """`x / sqrt(mean(x ** 2) + epsilon) * scale`, the mean over some axes of each example. Its core is an `nn.RMSNorm`.

    Args:
        axis: the axis or axes that are normalized.
        epsilon: a small number against division by zero.
        kwargs: those of `Layer`.

    Numerics:
        As `LayerNormalization`.
    """

    variable_names = ("scale",)
    scale = CoreVariable("weight")

    def __init__(self, axis: int | Sequence[int] = -1, epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._take_axis(axis)
        self.epsilon = number("epsilon", epsilon)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Makes `scale`; the lengths of the axes must be known."""
        lengths = self._lengths(input_shape)
        core = nn.RMSNorm(lengths, eps=self.epsilon, elementwise_affine=False)
        core.elementwise_affine = True
        core.weight = self._new(initializers.Ones(), lengths)
        self.core = core

    def call(self, inputs: Any) -> Any:
        """Returns the outputs, of the shape of the inputs, in the compute dtype."""
        return self._normalized(inputs)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {**super().get_config(), "axis": self.axis, "epsilon": self.epsilon}
