"""`Activation` and `Softmax`: layers without variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers import activations
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.carrying import LayerUpCast

__all__ = ["Activation", "Softmax", "as_mask", "masked_softmax"]


@builtin()
class Activation(Layer):
    """A function of each number, in the compute dtype.

    Args:
        activation: by name, or any function of a tensor.
        kwargs: those of `Layer`.

    Example:
        >>> Activation("relu")([-3.0, 2.0])
        tensor([0., 2.])
    """

    def __init__(self, activation: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.activation: Any = activations.get(activation)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """Returns the function of the inputs."""
        return inputs if self.activation is None else self.activation(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {**super().get_config(), "activation": activations.name_of(self.activation)}


@builtin()
class Softmax(Layer):
    """`exp(x)` divided by its sum along one or several axes.

    Args:
        axis: the axis or axes.
        kwargs: those of `Layer`.

    Numerics:
        In float32 at least, from the input as it comes; the result is rounded to the compute dtype. What is masked
        gets zero, and what is kept sums to one however small it is. Where everything along the axes is masked, all is
        zero.

    Example:
        >>> Softmax()(torch.tensor([1.0, 5.0, 1.0]), mask=torch.tensor([True, False, True]))
        tensor([0.5000, 0.0000, 0.5000])
    """

    _narrowcast_kind = "softmax"
    _narrowcast_float_carrier = LayerUpCast

    def __init__(self, axis: int | Sequence[int] = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        axes = axis if isinstance(axis, list | tuple) else [axis]
        if not axes or any(isinstance(a, bool) or not isinstance(a, int) for a in axes):
            raise LayerError("Axis of Softmax is not usable", got={"axis": axis}, expected="a whole number, or several")
        self.axis = list(axis) if isinstance(axis, list | tuple) else axis
        self.supports_masking = True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the shares.

        Args:
            inputs: a tensor of floats.
            mask: bools (or whole numbers, 1 for keep) that broadcast to the inputs: what is kept.
        """
        axes: Any = self.axis if isinstance(self.axis, list) else [self.axis]
        return masked_softmax(inputs, axes, None if mask is None else as_mask(self, mask, inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {**super().get_config(), "axis": self.axis}


def as_mask(layer: Any, mask: Any, inputs: Tensor | None = None) -> Tensor:
    """Returns a mask as bools.

    Args:
        layer: for the words of errors.
        mask: bools, or whole numbers of which 0 means drop.
        inputs: what it must broadcast to, if that is known.

    Raises:
        LayerError: it holds floats, which some libraries add and others compare with 0, or it does not broadcast.
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        raise LayerError(
            f"Mask of {type(layer).__name__} at {layer.path!r} could mean two things",
            got={"dtype" if isinstance(mask, Tensor) else "type": getattr(mask, "dtype", type(mask).__name__)},
            expected="bools, True for keep; a mask of floats could be one that is added",
            fix="Give `mask.bool()` where 1 means keep, or `mask == 0` where a large negative number means drop",
        )
    kept: Tensor = mask if mask.dtype is torch.bool else torch.ne(mask, 0)
    if inputs is not None:
        fits = mask.dim() <= inputs.dim() and all(
            m in (1, i) for m, i in zip(mask.shape[::-1], inputs.shape[::-1], strict=False)
        )
        if not fits:
            raise LayerError(
                f"Mask of {type(layer).__name__} at {layer.path!r} does not broadcast to the inputs",
                got={"mask": tuple(mask.shape), "inputs": tuple(inputs.shape)},
                expected="each axis of length 1, or as long as that of the inputs",
            )
    return kept


def masked_softmax(x: Tensor, axes: Sequence[int], mask: Tensor | None) -> Tensor:
    """Returns the softmax of `x` over `axes` with zeros where `mask` is false.

    Selected and not added: a large negative number could be less than what is kept. Where nothing is kept, the
    softmax is of zeros, so that its gradient is finite, and then set to zero.
    """
    if mask is None:
        return _softmax(x, axes)
    mask = mask.expand(x.shape)
    kept_any = mask.any(axes[0], keepdim=True)
    for axis in axes[1:]:
        kept_any = kept_any.any(axis, keepdim=True)
    selected = torch.where(mask, x, torch.where(kept_any, -torch.inf, 0.0).to(x.dtype))
    return _softmax(selected, axes).masked_fill(~mask, 0)


def _softmax(x: Tensor, axes: Sequence[int]) -> Tensor:
    if len(axes) == 1:
        return torch.softmax(x, axes[0])
    last = list(range(-len(axes), 0))
    moved = x.movedim(list(axes), last)
    shares = torch.softmax(moved.flatten(-len(axes)), -1).view(moved.shape)
    return torch.movedim(shares, last, list(axes))
