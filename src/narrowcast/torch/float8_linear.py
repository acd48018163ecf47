"""Linear layers in float8: `nn.Linear` and Hugging Face's `Conv1D`."""

from __future__ import annotations

from torch import Tensor, nn

from narrowcast.torch.float8_scheme import Float8Layer, Float8Scheme, blockwise, current, delayed, rowwise
from narrowcast.torch.float8_state import Stateful
from narrowcast.torch.scheme import register

__all__ = ["DelayedConv1D", "DelayedLinear", "Float8Conv1D", "Float8Linear"]


class Float8Linear(Float8Layer):
    """`nn.Linear` in float8."""

    def _narrowcast_run(self, input: Tensor) -> Tensor:
        return self._narrowcast_multiply(0, input, self._narrowcast_master("weight"), self._narrowcast_narrow("bias"))


class Float8Conv1D(Float8Layer):
    """Hugging Face's `Conv1D`, whose weight lies as (in, out), in float8."""

    def _narrowcast_run(self, x: Tensor) -> Tensor:
        return self._narrowcast_multiply(0, x, self._narrowcast_master("weight").t(), self._narrowcast_narrow("bias"))


class DelayedLinear(Stateful, Float8Linear):
    """`nn.Linear` in float8 with delayed scaling."""


class DelayedConv1D(Stateful, Float8Conv1D):
    """`Conv1D` in float8 with delayed scaling."""


_DELAYED = (DelayedConv1D, {nn.Linear.forward: DelayedLinear})
_LINEAR = (Float8Conv1D, {nn.Linear.forward: Float8Linear})

register("float8", ["linear"], Float8Scheme(delayed, *_DELAYED, has_state=True))
register("float8/current", ["linear"], Float8Scheme(current, *_LINEAR))
register("float8/rowwise", ["linear"], Float8Scheme(rowwise, *_LINEAR, by_row=True))
register("float8/block", ["linear"], Float8Scheme(blockwise, *_LINEAR, has_gemm=False))
