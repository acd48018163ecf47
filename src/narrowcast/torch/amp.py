"""Loss scaling for gradients that pass through float16: `torch.amp.GradScaler` with its gaps closed.

float16 has no gradients below 6e-8. The loss is multiplied by a scale, gradients are divided by it before the optimizer
sees them, and a step whose gradients overflowed is skipped and the scale lowered. bfloat16 needs none of this.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Mapping
from numbers import Integral, Real
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.dtype_policies import dtypes
from narrowcast.errors import LossScaleError
from narrowcast.numerics.scaling import LARGEST_FLOAT32
from narrowcast.plan.plan import Plan
from narrowcast.torch import float8_clock

__all__ = ["GradScaler", "expect_scaler"]


_SMALLEST_FLOAT32 = dtypes.get("float32").smallest_normal


class GradScaler(torch.amp.GradScaler):
    """Multiplies a loss so that its gradients fit in float16, and adapts the factor as training goes on.

    It is used like `torch.amp.GradScaler` and takes its `state_dict`. Beyond that: the scale never falls below `floor`
    and never becomes infinite; it grows again after any `load_state_dict` and any change of the interval; all ranks
    take the same decision; a step without any gradient does no harm; settings and the order of calls are checked; and
    `step` says whether it was taken::

        for x, target in batches:
            loss = loss_of(model(x), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)                      # only to clip
            clip_grad_norm_(model.parameters(), 1.0)
            if scaler.step(optimizer):
                scheduler.step()                            # a skipped step does not count
            scaler.update()
            optimizer.zero_grad()

    Args:
        device: the device type of the gradients; that of the accelerator, or `"cpu"`, where it is not given.
        init_scale: the first scale, finite and above 0.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without overflow; above 1.
        backoff_factor: what it is multiplied by after an overflow; between 0 and 1.
        growth_interval: the number of steps, at least 1.
        enabled: whether to scale at all; otherwise everything passes through.
        floor: the smallest scale. 1: gradients are never made smaller than they are.
        group: the process group whose ranks take one decision; all ranks, where it is not given and there are several.

    Raises:
        LossScaleError: a setting is out of its range.

    Numerics:
        The scale is a float32 on the device; with factors that are powers of two, scaling is exact.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu")
        >>> scaler.scale(3 * weight.sum()).backward()
        >>> scaler.step(optimizer)
        True
        >>> scaler.update()
        >>> weight.item()
        -0.5
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        floor: float = 1.0,
        group: Any = None,
    ) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator()
            device = "cpu" if accelerator is None else accelerator.type
        _check_settings(init_scale, growth_factor, backoff_factor, growth_interval)
        _check_scale("floor", floor)
        settings = float(max(init_scale, floor)), float(growth_factor), float(backoff_factor), int(growth_interval)
        super().__init__(device, *settings, enabled)
        self._floor = float(floor)
        self._group = group

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, once a step: for clipping, before `step`.

        Raises:
            LossScaleError: nothing was scaled before, `optimizer` is no optimizer, or gradients are float16.
            RuntimeError: it was called already since the last `update`.
        """
        if not self._enabled:
            return
        self._check_order("unscale_")
        _check_optimizer(optimizer)
        try:
            super().unscale_(optimizer)
        except ValueError as error:
            raise LossScaleError(
                "Gradients are float16 and cannot be unscaled: what a scale keeps would be lost again",
                expected="float32 gradients",
                fix="Store the variables in float32: apply 'mixed_float16' in place of 'float16'",
            ) from error
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        scale = cast(torch.Tensor, self._scale)  # made with the first loss
        # Always one tensor, also where this rank has no gradient: all ranks take part.
        is_bad = torch.zeros((), dtype=torch.float32, device=scale.device)
        for one in found.values():
            is_bad = torch.maximum(is_bad, one.to(scale.device))
        if _num_ranks() > 1:
            torch.distributed.all_reduce(is_bad, torch.distributed.ReduceOp.MAX, self._group)
        found.setdefault(scale.device, is_bad)
        for one in found.values():
            one.copy_(is_bad)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> bool:
        """Takes the optimizer's step unless a gradient overflowed, here or on another rank.

        Args:
            optimizer: the optimizer.
            args: for its `step`. A closure is not supported.
            kwargs: the same by name.

        Returns:
            Whether the step was taken. Learning rate schedulers and counters should follow only then.

        Raises:
            LossScaleError: nothing was scaled before, `optimizer` is no optimizer, or gradients are float16.
            RuntimeError: it was called already since the last `update`.
        """
        _check_optimizer(optimizer)
        if not self._enabled:
            optimizer.step(*args, **kwargs)
            return True
        self._check_order("step")
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        super().step(optimizer, *args, **kwargs)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        is_taken = not any(bool(one) for one in found.values())
        if not is_taken:
            float8_clock.forget(optimizer)
        return is_taken

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last `update` found.

        Args:
            new_scale: a scale to set instead, finite and above 0; no less than the floor is set.

        Raises:
            LossScaleError: no step was taken or skipped before, or `new_scale` is not usable.
        """
        if not self._enabled:
            return
        self._check_order("update")
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
                new_scale = float(new_scale)
            _check_scale("new_scale", new_scale)
        elif not self._per_optimizer_states:
            raise LossScaleError("Loss scaler is updated before a step", fix="Call `step(optimizer)` first")
        super().update(new_scale)
        cast(torch.Tensor, self._scale).clamp_(min=self._floor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of steps without overflow after which the scale grows. At least 1.

        Where so many steps have gone by already, the scale grows after the next one.
        """
        _check_settings(1.0, 2.0, 0.5, new_interval)
        super().set_growth_interval(int(new_interval))
        self._limit_tracker()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state saved by this class or by `torch.amp.GradScaler`. The mapping stays as it is.

        Raises:
            LossScaleError: an entry is missing or out of its range.
        """
        if not self._enabled:
            return
        missing = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - set(state_dict)
        if missing:
            raise LossScaleError(
                "State of a loss scaler is not complete",
                got={"missing": sorted(missing)},
                fix="Give what `state_dict()` returned, of a scaler that was enabled",
            )
        scale = float(state_dict["scale"])
        # A run that went to 0 or infinity under another scaler begins again at the floor.
        scale = max(scale, self._floor) if scale <= LARGEST_FLOAT32 else self._floor
        _check_settings(scale, state_dict["growth_factor"], state_dict["backoff_factor"], state_dict["growth_interval"])
        super().load_state_dict({**state_dict, "scale": scale})
        self._limit_tracker()

    def _limit_tracker(self) -> None:
        # PyTorch compares the number of good steps with the interval for equality: beyond it, the scale never grows.
        last = self._growth_interval - 1
        self._init_growth_tracker = min(max(int(self._init_growth_tracker), 0), last)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(0, last)

    def _check_order(self, call: str) -> None:
        if self._scale is None:
            raise LossScaleError(
                f"Loss scaler is asked for `{call}` before anything was scaled",
                fix="Call `scaler.scale(loss).backward()` in place of `loss.backward()`",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_group": None}  # a process group cannot be pickled


def _check_settings(scale: Any, growth_factor: Any, backoff_factor: Any, growth_interval: Any) -> None:
    _check_scale("init_scale", scale)
    if not _is_number(growth_factor) or not 1.0 < growth_factor < math.inf:
        raise _bad("growth_factor", growth_factor, "a finite number above 1")
    if not _is_number(backoff_factor) or not 0.0 < backoff_factor < 1.0:
        raise _bad("backoff_factor", backoff_factor, "a number between 0 and 1")
    if isinstance(growth_interval, bool) or not isinstance(growth_interval, Integral) or growth_interval < 1:
        raise _bad("growth_interval", growth_interval, "an integer of at least 1")


def _check_scale(name: str, value: Any) -> None:
    # Of the numbers above 0, those that float32 holds with all its digits: the scale is one.
    if not _is_number(value) or not _SMALLEST_FLOAT32 <= value <= LARGEST_FLOAT32:
        raise _bad(name, value, f"a number above 0, from {_SMALLEST_FLOAT32:.3g} to {LARGEST_FLOAT32:.3g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _bad(name: str, value: Any, expected: str) -> LossScaleError:
    return LossScaleError("Setting of a loss scaler is not usable", got={name: value}, expected=expected)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, torch.amp.GradScaler) or not hasattr(optimizer, "param_groups"):
        raise LossScaleError(
            "Loss scaler is given no optimizer",
            got={"optimizer": type(optimizer).__name__},
            expected="an optimizer itself, not one that is wrapped in a scaler",
        )


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


_NO_SCALER = (
    "Layers of this model compute in float16, and its optimizer stepped without a loss scaler: gradients below 6e-8 "
    "become zero. Use narrowcast.torch.GradScaler and variables in float32 (mixed_float16), or a policy of bfloat16, "
    "which needs no scaler."
)
_expecting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooks: list[Any] = []


def expect_scaler(model: nn.Module, plan: Plan) -> None:
    """Warns once, at the first optimizer step of `model`, if it computes in float16 and no scaler takes that step.

    Args:
        model: the model.
        plan: the plan that was carried out on it. Other policies than those that compute in float16 need no scaler.
    """
    if all(row.given.compute_dtype != "float16" for row in plan):
        _expecting.discard(model)
        return
    _expecting.add(model)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _expecting:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in list(_expecting):
        if any(id(parameter) in stepped for parameter in model.parameters()):
            _expecting.discard(model)
            if not _is_called_by_a_scaler():
                warnings.warn(_NO_SCALER, stacklevel=2)


def _is_called_by_a_scaler() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        frame = frame.f_back
    return False
