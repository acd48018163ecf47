"""Norms, softmax and losses under a float policy: they compute in float32 whatever the policy says.

Sums of squares and exponentials leave the range of float16 and the digits of bfloat16 long before their results do.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.torch.inputs import cast_arguments, cast_floats
from narrowcast.torch.shadow import Shadowed

__all__ = ["UpCast", "UpCastLoss"]


class UpCast(Shadowed):
    """A norm or a softmax: takes its input as it comes, computes in float32 at least, returns the compute dtype.

    Numerics:
        The input is not rounded to the compute dtype first, so values above its range (65504 in float16) do no harm.
        float64 where the policy computes in it. Running statistics stay in the dtype they have.
    """

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        return cast_floats(self._narrowcast_run_wide(args, kwargs), self._narrowcast_compute)

    def _narrowcast_run_wide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = torch.float64 if self._narrowcast_compute is torch.float64 else torch.float32
        args, kwargs = cast_arguments(args, kwargs, inner)
        return self._narrowcast_call(inner, inner, args, kwargs, buffers=True)


class UpCastLoss(UpCast):
    """A loss: as `UpCast`, and what it returns stays in float32 (float64 where the policy computes in it)."""

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        return self._narrowcast_run_wide(args, kwargs)
