"""`Embedding`: a row of a table for each whole number; and its reverse, for heads that share the table."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import dtypes
from narrowcast.errors import LayerError
from narrowcast.serialization import builtin, serialize
from narrowcast.torch.layers import initializers, regularizers
from narrowcast.torch.layers.calls import is_on_zeros
from narrowcast.torch.layers.configs import positive, refuse
from narrowcast.torch.layers.cores import CoreLayer, as_floats
from narrowcast.torch.layers.dense import Dense
from narrowcast.torch.layers.variables import CoreVariable

__all__ = ["Embedding", "ReversibleEmbedding"]

_NARROW = (torch.bfloat16, torch.float16)


@builtin()
class Embedding(CoreLayer):
    """The row of `embeddings` for each whole number of the input. Its core is an `nn.Embedding`.

    Args:
        input_dim: how many rows there are; the largest number is one less.
        output_dim: the length of a row.
        embeddings_initializer: what makes the values.
        embeddings_regularizer: a penalty on them.
        embeddings_constraint: not supported.
        mask_zero: whether 0 stands for no token: `compute_mask` then returns where the input is not 0.
        weights: the values, shape `(input_dim, output_dim)`, in place of the initializer.
        lora_rank: not supported.
        lora_alpha: without `lora_rank` it means nothing.
        quantization_config: not supported.
        kwargs: those of `Layer`.

    Example:
        >>> layer = Embedding(100, 8, dtype="bfloat16")
        >>> layer(torch.tensor([[1, 2, 3]])).shape, layer(torch.tensor([1])).dtype
        (torch.Size([1, 3, 8]), torch.bfloat16)
    """

    variable_names = ("embeddings",)
    embeddings = CoreVariable("weight")

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: Any = None,
        lora_alpha: Any = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        refuse("constraint", embeddings_constraint)
        refuse("lora_rank", lora_rank)
        refuse("quantization_config", quantization_config)
        self.input_dim, self.output_dim = positive("input_dim", input_dim), positive("output_dim", output_dim)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.embeddings_regularizer = regularizers.get(embeddings_regularizer)
        self.mask_zero = self.supports_masking = bool(mask_zero)
        self._take(weights)

    def _take(self, weights: Any) -> None:
        if weights is not None:
            self.build()
            self.embeddings = weights[0] if isinstance(weights, list) and len(weights) == 1 else weights

    def build(self, input_shape: Any = None) -> None:
        """Makes the table; the shape of the input does not matter."""
        self.core = _table(self._new(self.embeddings_initializer, (self.input_dim, self.output_dim)))

    def call(self, inputs: Any) -> Any:
        """Returns the rows, shape `(..., output_dim)`, in the compute dtype."""
        return self.core(_as_ids(self, inputs))

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns where the input is not 0, if 0 stands for no token."""
        return inputs != 0 if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return (*input_shape, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": serialize(self.embeddings_initializer),
            "embeddings_regularizer": serialize(self.embeddings_regularizer),
            "mask_zero": self.mask_zero,
        }


def _table(weight: nn.Parameter) -> nn.Embedding:
    core = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    core.weight = weight
    return core


def _as_ids(layer: Any, inputs: Any) -> Tensor:
    is_narrow = isinstance(inputs, Tensor) and inputs.dtype in _NARROW and not is_on_zeros()
    if not isinstance(inputs, Tensor) or inputs.is_complex() or is_narrow:
        raise LayerError(
            f"Input of {type(layer).__name__} at {layer.path!r} is no tensor of whole numbers",
            got={"dtype" if isinstance(inputs, Tensor) else "type": getattr(inputs, "dtype", type(inputs).__name__)},
            expected="a tensor of integers (16-bit floats do not hold numbers above 256 or 2048 exactly)",
        )
    return inputs if inputs.dtype in (torch.int64, torch.int32) else inputs.to(torch.int64)


@builtin()
class ReversibleEmbedding(Embedding):
    """An embedding that can be called the other way round: from rows to a number for each row of the table.

    The way back is a child, `head`: an `nn.Linear` whose weight is the table, one variable with two uses that are
    quantized together; or a `Dense` of its own.

    Args:
        input_dim: see `Embedding`.
        output_dim: see `Embedding`.
        tie_weights: whether the way back uses the same table.
        embeddings_initializer: see `Embedding`.
        embeddings_regularizer: see `Embedding`.
        embeddings_constraint: not supported.
        mask_zero: see `Embedding`.
        reverse_dtype: the dtype that the way back computes in and returns; by default the compute dtype.
        logit_soft_cap: a positive number `c`: the result of the way back is `c * tanh(result / c)`.
        kwargs: those of `Embedding` and of `Layer`.

    Example:
        >>> layer = ReversibleEmbedding(100, 8)
        >>> layer(layer(torch.tensor([[1, 2]])), reverse=True).shape
        torch.Size([1, 2, 100])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        tie_weights: bool = True,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        reverse_dtype: Any = None,
        logit_soft_cap: float | None = None,
        **kwargs: Any,
    ) -> None:
        weights = kwargs.pop("weights", None)
        super().__init__(
            input_dim,
            output_dim,
            embeddings_initializer,
            embeddings_regularizer,
            embeddings_constraint,
            mask_zero,
            **kwargs,
        )
        self.tie_weights = bool(tie_weights)
        self.reverse_dtype = None if reverse_dtype is None else dtypes.standardize(reverse_dtype)
        self.logit_soft_cap = logit_soft_cap
        self._take(weights)

    _variables_below: ClassVar = {"reverse_embeddings": ("head", "kernel")}

    @property
    def reverse_embeddings(self) -> Any:
        """The variable of the way back, shape `(output_dim, input_dim)`."""
        return self.head.kernel if isinstance(self.head, Dense) else self.head.weight.t()

    def _tied_modules(self) -> list[nn.Module]:
        return [self.head] if self.tie_weights else []

    def build(self, input_shape: Any = None) -> None:
        """Makes the table, and the variable of the way back where it has one of its own."""
        super().build(input_shape)
        if self.tie_weights:
            self.head: Any = nn.Linear(self.output_dim, self.input_dim, bias=False, device="meta")
            self.head.weight = self.core.weight
        else:
            self.head = Dense(self.input_dim, use_bias=False, kernel_initializer=self.embeddings_initializer)
            self.head.build((None, self.output_dim))

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Returns the rows, or where `reverse` the products with every row, shape `(..., input_dim)`."""
        if not reverse:
            return super().call(inputs)
        x = as_floats(self, inputs)
        if self.reverse_dtype is None:
            logits = self.head(x)
        else:
            dtype = getattr(torch, self.reverse_dtype)
            logits = x.to(dtype) @ self.reverse_embeddings.to(dtype)
        return logits if self.logit_soft_cap is None else torch.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap

    def compute_output_shape(self, input_shape: Any, reverse: bool = False) -> Any:
        """See `Layer`."""
        return (*input_shape[:-1], self.input_dim) if reverse else (*input_shape, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        return {
            **super().get_config(),
            "tie_weights": self.tie_weights,
            "reverse_dtype": self.reverse_dtype,
            "logit_soft_cap": self.logit_soft_cap,
        }
