"""The losses of a layer: what its calls add, penalties on outputs, penalties on variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.errors import LayerError
from narrowcast.torch.layers import weights
from narrowcast.torch.layers.calls import current_call

__all__ = ["Penalties"]


class Penalties(nn.Module):
    """What a layer has to do with losses; a part of `Layer`."""

    variable_names: ClassVar[tuple[str, ...]] = ()
    activity_regularizer: Any
    built: bool
    _losses: list[Tensor]
    _losses_call: int
    _flatten_layers: Any

    def add_loss(self, loss: Any) -> None:
        """Adds a scalar tensor, or a list of them, to `losses`; called from within `call`.

        Raises:
            LayerError: it is not a tensor.
        """
        for part in loss if isinstance(loss, list | tuple) else [loss]:
            if not isinstance(part, Tensor):
                raise LayerError("Loss is not a tensor", got={"loss": part}, expected="a scalar tensor")
            # A layer may be called several times within one call of the model; the next one begins anew.
            if torch.compiler.is_compiling():
                self._losses = [part]
            elif self._losses_call != current_call():
                self._losses, self._losses_call = [part], current_call()
            else:
                self._losses.append(part)

    def _penalize(self, outputs: Any) -> None:
        for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
            if isinstance(output, Tensor) and output.is_floating_point():
                # A sum of squares leaves the range of float16 long before the outputs do.
                penalty = self.activity_regularizer(output if output.dtype is torch.float64 else output.float())
                self.add_loss(penalty / max(output.shape[0], 1) if output.dim() else penalty)

    @property
    def losses(self) -> list[Tensor]:
        """What was added in the last call of this layer and of all below, and the penalties of their variables.

        Penalties of variables are computed when this is read, in the variable dtype, from the variables as they are
        stored (of quantized ones, from the values they stand for). Those on outputs are in float32, divided by the
        length of the batch.
        """
        layers = self._flatten_layers()
        found = [loss for layer in layers for loss in layer._losses]
        return found + [regularizer(value) for layer in layers for regularizer, value in layer._regularized()]

    def _regularized(self) -> Iterator[tuple[Any, Tensor]]:
        for name in self.variable_names:
            regularizer = getattr(self, f"{name}_regularizer", None)
            value = getattr(self, name) if regularizer is not None and self.built else None
            if value is not None:
                yield regularizer, value
        for _, parameter, weight in weights.named(self):
            if weight.regularizer is not None and parameter.requires_grad:
                yield weight.regularizer, parameter
