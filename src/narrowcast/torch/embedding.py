"""Embeddings under a float policy: rows are taken from the stored table and then cast, not the other way round."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowcast.torch.carried import Cast, drift
from narrowcast.torch.inputs import cast_floats

__all__ = ["EmbeddingCast"]


class EmbeddingCast(Cast):
    """`nn.Embedding` and `nn.EmbeddingBag`: the rows asked for, in the compute dtype.

    Numerics:
        Casting the rows gives the values of casting the table, at a fraction of the cost. Bags are summed, and
        `max_norm` renormalizes, in the variable dtype, which is never narrower than the compute dtype.
    """

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        if weight.dtype is not self._narrowcast_variable and weight.dtype is not self._narrowcast_compute:
            raise drift(self, "weight", weight.dtype)
        # Indices are integers; the weights of a bag's samples have to have the dtype of the table.
        args, kwargs = cast_floats(args, weight.dtype), cast_floats(kwargs, weight.dtype)
        return cast_floats(self._narrowcast_base.forward(self, *args, **kwargs), self._narrowcast_compute)
