"""`Conv1D` and `Conv2D`: one kernel at every place of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers.configs import positive
from narrowcast.torch.layers.cores import KernelLayer, as_floats
from narrowcast.torch.layers.shapes import axis_length
from narrowcast.torch.layers.variables import CoreVariable

__all__ = ["Conv1D", "Conv2D"]


def _kernel_to_keras(layer: Any, weight: Tensor) -> Tensor:
    return weight.permute(*range(2, weight.dim()), 1, 0)


def _kernel_from_keras(layer: Any, kernel: Tensor) -> Tensor:
    return kernel.permute(-1, -2, *range(kernel.dim() - 2))


class _Convolution(KernelLayer):
    """A convolution over `num_axes` axes; see its subclasses."""

    num_axes: ClassVar[int]
    _core_class: ClassVar[type[nn.Conv1d | nn.Conv2d]]
    _paddings: ClassVar[tuple[str, ...]] = ("valid", "same")

    variable_names = ("kernel", "bias")
    kernel = CoreVariable("weight", _kernel_to_keras, _kernel_from_keras)
    bias = CoreVariable("bias")

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | Sequence[int] = 1,
        groups: int = 1,
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
        self.filters, self.groups = positive("filters", filters), positive("groups", groups)
        self.kernel_size = self._lengths("kernel_size", kernel_size)
        self.strides = self._lengths("strides", strides)
        self.dilation_rate = self._lengths("dilation_rate", dilation_rate)
        self.padding = padding.lower() if isinstance(padding, str) else padding
        self.data_format = "channels_last" if data_format is None else data_format
        if self.padding not in self._paddings:
            raise LayerError(
                "Padding of a convolution is unknown", got={"padding": padding}, expected=f"one of {self._paddings}"
            )
        if self.data_format not in ("channels_last", "channels_first"):
            raise LayerError(
                "Data format of a convolution is unknown",
                got={"data_format": data_format},
                expected="'channels_last' or 'channels_first'",
            )
        if self.filters % self.groups:
            raise LayerError(
                "Filters of a convolution cannot be split into its groups",
                got={"filters": filters, "groups": groups},
                expected="a multiple of the groups",
            )
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise LayerError(
                "A convolution cannot have strides and a dilation",
                got={"strides": strides, "dilation_rate": dilation_rate},
                expected="1 for one of them",
            )

    def _lengths(self, name: str, value: Any) -> tuple[int, ...]:
        given = (value,) * self.num_axes if isinstance(value, int) else tuple(value)
        if len(given) != self.num_axes:
            raise LayerError(
                f"Argument {name} of a convolution has another number of axes",
                got={name: value},
                expected=f"a whole number, or {self.num_axes} of them",
            )
        return tuple(positive(name, length) for length in given)

    def build(self, input_shape: Any) -> None:
        """Makes the kernel and the bias; the number of channels must be known."""
        num_channels = axis_length(self, input_shape, self._channel_axis)
        if num_channels % self.groups:
            raise LayerError(
                f"{type(self).__name__} at {self.path!r} cannot split the channels of its input into its groups",
                got={"channels": num_channels, "groups": self.groups},
                expected="a multiple of the groups",
            )
        self.compute_output_shape(input_shape)
        shape = (*self.kernel_size, num_channels // self.groups, self.filters)
        core: Any = self._core_class(
            num_channels,
            self.filters,
            self.kernel_size,  # type: ignore[arg-type]
            self.strides,  # type: ignore[arg-type]
            self._even_padding(),  # type: ignore[arg-type]
            self.dilation_rate,  # type: ignore[arg-type]
            self.groups,
            bias=False,
            device="meta",
        )
        core.weight = self._new(self.kernel_initializer, shape, lambda values: _kernel_from_keras(self, values))
        core.bias = self._new(self.bias_initializer, (self.filters,)) if self.use_bias else None
        self.core = core

    @property
    def _channel_axis(self) -> int:
        return -1 if self.data_format == "channels_last" else 1

    def _even_padding(self) -> tuple[int, ...]:
        """What the core pads itself: the same on both sides, whatever the length."""
        total = [self._total(axis, None) for axis in range(self.num_axes)]
        is_even = self.padding == "same" and max(self.strides) == 1 and all(length % 2 == 0 for length in total)
        return tuple(length // 2 for length in total) if is_even else (0,) * self.num_axes

    def _total(self, axis: int, length: int | None) -> int:
        """How much an axis is padded in all; with strides that depends on its length."""
        reach = self.dilation_rate[axis] * (self.kernel_size[axis] - 1)
        if self.padding == "valid":
            return 0
        if length is None or self.strides[axis] == 1 or self.padding == "causal":
            return reach
        num_steps = math.ceil(length / self.strides[axis])
        return max((num_steps - 1) * self.strides[axis] + reach + 1 - length, 0)

    def call(self, inputs: Any) -> Any:
        """Returns the outputs in the compute dtype, in the data format of the inputs."""
        x = as_floats(self, inputs)
        is_last = self.data_format == "channels_last"
        if is_last:
            x = x.movedim(-1, 1)
        if not any(self.core.padding):
            x = self._padded(x)
        y = self.core(x)
        return self._activated(y.movedim(1, -1) if is_last else y)

    def _padded(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for axis in reversed(range(self.num_axes)):
            total = self._total(axis, x.shape[axis + 2])
            before = total if self.padding == "causal" else total // 2
            pads += [before, total - before]
        return F.pad(x, pads) if any(pads) else x

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        first = 1 if self.data_format == "channels_last" else 2
        if len(input_shape) != self.num_axes + 2:
            raise LayerError(
                f"Input of {type(self).__name__} at {self.path!r} has another number of axes",
                got={"input_shape": tuple(input_shape)},
                expected=f"{self.num_axes + 2}, with the batch and the channels",
            )
        lengths: list[int | None] = []
        for axis in range(self.num_axes):
            length = input_shape[first + axis]
            if length is None:
                lengths.append(None)
                continue
            reach = self.dilation_rate[axis] * (self.kernel_size[axis] - 1)
            steps = (length + self._total(axis, length) - reach - 1) // self.strides[axis] + 1
            if steps < 1:
                raise LayerError(
                    f"Input of {type(self).__name__} at {self.path!r} is shorter than the kernel",
                    got={"input_shape": tuple(input_shape)},
                    expected=f"at least {reach + 1} on axis {first + axis}",
                )
            lengths.append(steps)
        is_last = self.data_format == "channels_last"
        return (input_shape[0], *lengths, self.filters) if is_last else (input_shape[0], self.filters, *lengths)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": list(self.kernel_size),
            "strides": list(self.strides),
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": list(self.dilation_rate),
            "groups": self.groups,
            **self._kernel_config(),
        }


@builtin("Convolution1D")
class Conv1D(_Convolution):
    """A convolution over steps: `(batch, steps, channels)` to `(batch, steps', filters)`. Its core is an `nn.Conv1d`.

    Args:
        filters: the channels of the output.
        kernel_size: how many steps the kernel spans.
        strides: how many steps it goes on.
        padding: `valid` (none), `same` (as many outputs as inputs, divided by the strides; the odd zero comes last) or
            `causal` (zeros before the first step only).
        data_format: `channels_last` (the default) or `channels_first`.
        dilation_rate: how far apart the steps are that the kernel looks at.
        groups: into how many groups the channels are split, each with filters of its own.
        activation: see `KernelLayer`.
        use_bias: see `KernelLayer`.
        kernel_initializer: for the kernel, shape `(kernel_size, channels / groups, filters)`.
        bias_initializer: for the bias, shape `(filters,)`.
        kernel_regularizer: see `KernelLayer`.
        bias_regularizer: see `KernelLayer`.
        activity_regularizer: a penalty on the outputs.
        kwargs: those of `KernelLayer` and of `Layer`.

    Example:
        >>> import torch
        >>> Conv1D(8, 3, padding="same")(torch.ones(2, 10, 4)).shape
        torch.Size([2, 10, 8])
    """

    num_axes = 1
    _core_class = nn.Conv1d
    _paddings = ("valid", "same", "causal")


@builtin("Convolution2D")
class Conv2D(_Convolution):
    """A convolution over rows and columns: `(batch, rows, columns, channels)`. Its core is an `nn.Conv2d`.

    Arguments are those of `Conv1D`, each length one number for both axes or two; `padding` is `valid` or `same`, and
    the kernel has the shape `(rows, columns, channels / groups, filters)`.

    Example:
        >>> import torch
        >>> Conv2D(8, 3, strides=2, padding="same")(torch.ones(2, 7, 8, 3)).shape
        torch.Size([2, 4, 4, 8])
    """

    num_axes = 2
    _core_class = nn.Conv2d
