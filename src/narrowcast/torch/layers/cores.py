"""What layers with a core have in common: the values of its parameters, and Keras' arguments for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import dtypes, registry
from narrowcast.errors import LayerError, UnsupportedError
from narrowcast.serialization import serialize
from narrowcast.torch.layers import activations, initializers, regularizers
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.carrying import is_empty
from narrowcast.torch.layers.configs import refuse

__all__ = ["CoreLayer", "KernelLayer", "as_floats"]


class CoreLayer(Layer):
    """A layer whose arithmetic is that of a module of PyTorch, its core, which `build` makes."""

    _narrowcast_core = True
    core: Any

    def _new(
        self, initializer: Any, shape: tuple[int, ...], arrange: Callable[[Tensor], Tensor] | None = None
    ) -> nn.Parameter:
        """Makes the values of a parameter of the core.

        Args:
            initializer: called with a shape in Keras' layout and a dtype.
            shape: in Keras' layout.
            arrange: from Keras' layout to that of the core.
        """
        dtype = self._variable_dtype()
        values = torch.empty(shape, dtype=getattr(torch, dtype)) if is_empty() else initializer(shape, dtype=dtype)
        if tuple(values.shape) != tuple(shape):
            raise LayerError(
                f"Initializer of {type(self).__name__} at {self.path!r} returns another shape than it was asked for",
                got={"shape": tuple(values.shape)},
                expected=str(tuple(shape)),
            )
        return nn.Parameter((values.detach() if arrange is None else arrange(values.detach())).contiguous())

    def _variable_dtype(self) -> str:
        policy = self._resolved_policy()
        name = str(policy.variable_dtype)
        if not dtypes.get(name).is_floating or not dtypes.get(str(policy.compute_dtype)).is_floating:
            raise UnsupportedError(
                f"{type(self).__name__} at {self.path!r} multiplies floats and cannot have the policy {policy.name!r}",
                got={"compute_dtype": policy.compute_dtype},
                expected="a policy that computes in floats",
                fix=f"{name!r} is a dtype here; the mode is '{name}_from_float32'" if registry.find_mode(name) else "",
            )
        return name


class KernelLayer(CoreLayer):
    """A layer that multiplies its input by a kernel: the arguments that all such layers have in Keras.

    Args:
        activation: a function of the output, by name or itself.
        use_bias: whether a bias is added.
        kernel_initializer: what makes the values of the kernel.
        bias_initializer: what makes the values of the bias.
        kernel_regularizer: a penalty on the kernel.
        bias_regularizer: a penalty on the bias.
        kernel_constraint: not supported.
        bias_constraint: not supported.
        lora_rank: not supported.
        lora_alpha: without `lora_rank` it means nothing.
        quantization_config: not supported: a mode's settings are those of its policy.
        kwargs: those of `Layer`.
    """

    activation: Any

    def __init__(
        self,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        lora_rank: Any = None,
        lora_alpha: Any = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in (("constraint", kernel_constraint), ("constraint", bias_constraint)):
            refuse(name, value)
        refuse("lora_rank", lora_rank)
        refuse("quantization_config", quantization_config)
        self.activation = activations.get(activation)
        self.use_bias = bool(use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.supports_masking = True

    def _kernel_config(self, *, bias: bool = True) -> dict[str, Any]:
        config = {"activation": activations.name_of(self.activation)}
        if bias:
            config["use_bias"] = self.use_bias
        for part in ("kernel_initializer", "bias_initializer", "kernel_regularizer", "bias_regularizer"):
            config[part] = serialize(getattr(self, part))
        return config

    def _activated(self, outputs: Tensor) -> Any:
        return outputs if self.activation is None else self.activation(outputs)


def as_floats(layer: Layer, x: Any) -> Any:
    """Returns whole numbers and bools in the layer's compute dtype; anything else as it is.

    Raises:
        LayerError: `x` is not a tensor.
    """
    if not isinstance(x, Tensor):
        raise LayerError(
            f"Input of {type(layer).__name__} at {layer.path!r} is not a tensor",
            got={"type": type(x).__name__},
            expected="a tensor, a NumPy array or a list of numbers",
        )
    return x if x.is_floating_point() or x.is_complex() else x.to(getattr(torch, str(layer.compute_dtype)))
