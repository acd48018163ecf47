"""The state of delayed scaling at a module: what it holds, how a forward uses it, and how it is saved and loaded.

A module has one *role* for each tensor that is quantized: the input, the weight and the output's gradient of each of
its products, in this order (`ROLES`). Its state is four tensors with the roles along the first axis:

    float8_scale            float32  (roles,)          what values are multiplied by; 0: not known yet
    float8_amax_history     float32  (roles, length)   the amax of the last steps, a ring
    float8_history_index    int64    (roles,)          where the next amax goes
    float8_pending_amax     float32  (roles,)          the largest amax since the last advance

The first three are buffers. The pending one is a plain attribute: DistributedDataParallel overwrites every buffer by
rank 0's at each forward, and what this rank has seen would be lost. All four are in `state_dict`, so a checkpoint taken
at any moment resumes bit for bit. All stay float32 and int64, whatever the module is cast to.

What moves the state on is in `narrowcast.torch.float8_clock`; the arithmetic is `narrowcast.numerics.delayed_scaling`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowcast.numerics import delayed_scaling
from narrowcast.torch.float8_rounding import FORWARD, GRADIENT, Format

__all__ = ["HISTORY", "INDEX", "PENDING", "ROLES", "SCALE", "Stateful", "fit", "layout_problem", "new_state"]

SCALE = "float8_scale"
HISTORY = "float8_amax_history"
INDEX = "float8_history_index"
PENDING = "float8_pending_amax"

ROLES: tuple[tuple[str, Format], ...] = (("input", FORWARD), ("weight", FORWARD), ("gradient", GRADIENT))
"""The roles of one product and their formats. A module with several products has them several times."""

_RESET = (
    "Weights were loaded without the float8 state of their layers, which starts anew: the first step takes its scales "
    "from the data. To keep the scales, load a state_dict that was saved with them."
)


def new_state(num_products: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the four tensors of a module that has seen nothing yet, by name."""
    num_roles = num_products * len(ROLES)
    return {
        SCALE: torch.zeros(num_roles, dtype=torch.float32, device=device),
        HISTORY: torch.zeros(num_roles, length, dtype=torch.float32, device=device),
        INDEX: torch.zeros(num_roles, dtype=torch.int64, device=device),
        PENDING: torch.zeros(num_roles, dtype=torch.float32, device=device),
    }


class Stateful:
    """A module with float8 state: the part of a carrying class that keeps, saves and loads it.

    Its pending amax lives in the instance's `__dict__`, the rest among its buffers. `_float8_margin` and
    `_float8_use_max` are the policy's settings.
    """

    _float8_margin: int
    _float8_use_max: bool

    float8_scale: Tensor
    float8_amax_history: Tensor
    float8_history_index: Tensor
    float8_pending_amax: Tensor
    _buffers: dict[str, Any]
    training: bool

    def _narrowcast_is_recording(self) -> bool:
        # Reentrant checkpointing runs the first forward without gradients and records in the second.
        return self.training and torch.is_grad_enabled()

    def __setstate__(self, state: Any) -> None:
        from narrowcast.torch.float8_clock import register  # the clock needs this file

        super().__setstate__(state)  # type: ignore[misc]
        register(self)  # copies and unpickled modules too are moved on

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        pending = self.float8_pending_amax
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        moved = fn(pending)
        # `.half()` must not round the state.
        self.float8_pending_amax = moved if moved.dtype is pending.dtype else pending.to(moved.device)
        if pending.is_meta and not moved.is_meta:  # `to_empty` gives memory as it was left
            for name in (SCALE, HISTORY, INDEX, PENDING):
                getattr(self, name).zero_()
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[prefix + PENDING] = self.float8_pending_amax

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {
            name: state_dict[prefix + name] for name in (SCALE, HISTORY, INDEX, PENDING) if prefix + name in state_dict
        }
        present = {name: getattr(self, name) for name in (SCALE, HISTORY, INDEX, PENDING)}
        assigns = local_metadata.get("assign_to_params_buffers", False)
        fitted: Mapping[str, Tensor] | None = None
        if {SCALE, HISTORY, INDEX} <= set(given):
            problem = layout_problem(given, present)
            if problem:
                error_msgs.append(f"float8 state of {prefix.rstrip('.') or 'the module'!r} {problem}")
                fitted = present
            else:
                fitted = fit(given, present[HISTORY].shape[1])
        else:
            weights = [state_dict[prefix + name] for name in self._parameters if prefix + name in state_dict]  # type: ignore[attr-defined]
            if weights:
                warnings.warn(_RESET, stacklevel=2)
                device = weights[0].device if assigns else None
                fitted = {name: torch.zeros_like(tensor, device=device) for name, tensor in present.items()}
        # What follows loads the parameters and finds the state, in the shapes that it has to have.
        present_keys = {prefix + name: tensor for name, tensor in (fitted or present).items() if name != PENDING}
        super()._load_from_state_dict(  # type: ignore[misc]
            {**state_dict, **present_keys}, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + PENDING in unexpected_keys:
            unexpected_keys.remove(prefix + PENDING)
        if fitted is not None and assigns:
            self.float8_pending_amax = fitted[PENDING].detach()
        elif fitted is not None:
            with torch.no_grad():
                self.float8_pending_amax.copy_(fitted[PENDING])


def layout_problem(given: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> str:
    """Says what is wrong with the layout of a saved state; `''` where nothing is, whatever its history's length."""
    num_roles = present[SCALE].shape[0]
    shapes = {SCALE: (num_roles,), INDEX: (num_roles,), PENDING: (num_roles,)}
    for name, shape in shapes.items():
        if name in given and tuple(given[name].shape) != shape:
            return f"has another layout: {name} is {tuple(given[name].shape)} as saved, {shape} in the module"
    history = given[HISTORY]
    if history.dim() != 2 or history.shape[0] != num_roles or history.shape[1] < 1:
        return (
            f"has another layout: {HISTORY} is {tuple(history.shape)} as saved, "
            f"({num_roles}, any length) in the module; narrowcast.torch.float8_import reads those of other libraries"
        )
    return ""


def fit(given: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """Returns a saved state with a history of `length`: the newest entries are kept, older ones dropped."""
    history, index = given[HISTORY].float(), given[INDEX].to(torch.int64)
    if history.shape[1] != length:
        history, index = delayed_scaling.resize(history, index % history.shape[1], length)
    pending = given.get(PENDING)
    return {
        SCALE: given[SCALE].float(),
        HISTORY: history,
        INDEX: index % length,
        PENDING: torch.zeros_like(given[SCALE], dtype=torch.float32) if pending is None else pending.float(),
    }
