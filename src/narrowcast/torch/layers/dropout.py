"""`Dropout`: in training, numbers are set to zero at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin
from narrowcast.torch.layers.base import Layer

__all__ = ["Dropout"]


@builtin()
class Dropout(Layer):
    """In training, sets a share of the numbers to zero and multiplies the others by `1 / (1 - rate)`.

    Args:
        rate: the share, 0 to 1.
        noise_shape: the shape in which it is drawn, broadcast to the inputs: `(None, 1, None)` drops the same features
            at all steps. `None` in it stands for the length of the input.
        seed: the masks are then the same for every layer with this seed, call by call, whatever `torch.manual_seed`
            was told. A call within a backward pass (activation checkpointing) repeats the masks of the calls before it,
            last first. Under `torch.compile` masks come from torch's own generator.
        kwargs: those of `Layer`.

    Example:
        >>> layer = Dropout(0.5, seed=1)
        >>> layer(torch.ones(4)).tolist()
        [0.0, 2.0, 2.0, 2.0]
        >>> layer.eval()(torch.ones(4)).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self, rate: float, noise_shape: Sequence[Any] | None = None, seed: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise LayerError("Rate of Dropout is not usable", got={"rate": rate}, expected="a number from 0 to 1")
        if noise_shape is not None:
            is_shape = isinstance(noise_shape, list | tuple) and all(
                length is None or (isinstance(length, int) and not isinstance(length, bool) and length > 0)
                for length in noise_shape
            )
            if not is_shape:
                raise LayerError(
                    "Noise shape of Dropout is not usable",
                    got={"noise_shape": noise_shape},
                    expected="whole numbers above 0, and None for the length of the input",
                )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise LayerError("Seed of Dropout is not usable", got={"seed": seed}, expected="a whole number, or None")
        self.rate, self.seed = float(rate), seed
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)
        self.supports_masking = True
        self._num_drawn = self._num_repeated = 0

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the inputs, with a share of them dropped where `training` (by default `module.training`)."""
        if not training or self.rate == 0:
            return inputs
        shape = inputs.shape
        if self.noise_shape is not None:
            shape = [own if given is None else given for given, own in zip(self.noise_shape, shape, strict=True)]
        if self.seed is None or torch.compiler.is_compiling():
            if self.noise_shape is None:
                return F.dropout(inputs, self.rate)
            return inputs * F.dropout(inputs.new_ones(shape), self.rate)
        if self.rate == 1:
            return inputs * 0
        kept = torch.rand(shape, generator=self._generator()) >= self.rate
        return torch.where(kept.to(inputs.device), inputs / (1 - self.rate), torch.zeros_like(inputs))

    def _generator(self) -> torch.Generator:
        if torch._C._current_graph_task_id() == -1:  # not within a backward pass
            number = self._num_drawn
            self._num_drawn, self._num_repeated = number + 1, 0
        else:
            number = self._num_drawn - 1 - self._num_repeated
            self._num_repeated += 1
        return torch.Generator().manual_seed((int(self.seed or 0) * 1_000_003 + number) % 2**63)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """See `Layer`."""
        noise_shape = None if self.noise_shape is None else list(self.noise_shape)
        return {**super().get_config(), "rate": self.rate, "seed": self.seed, "noise_shape": noise_shape}
