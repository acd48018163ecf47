"""When the state of delayed scaling moves on: once an optimizer step, for all layers at once.

A hook on PyTorch's optimizers is the clock. It advances every float8 layer that has seen something since the last time;
a layer that has not does not move, so a second optimizer, or one that calls the hook twice, finds nothing to do. A step
that a gradient scaler skipped does not count, and what it saw is forgotten. Where an optimizer steps inside backward,
parameter by parameter, the state moves on once, when backward is over.

With several ranks the pending amaxes are brought to their maximum first, by one all-reduce over the ranks that train
one model: those given to `set_clock`, those of the FSDP mesh, or those of the DistributedDataParallel around the
layers.

The state of all layers lies in arenas (`narrowcast.torch.float8_arena`), which are a cache: they are made anew where a
layer's buffer was replaced (a move to another device, a copy, a load that assigns).
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.errors import ModelError
from narrowcast.torch.float8_arena import Arena, advance_all
from narrowcast.torch.float8_state import PENDING

__all__ = ["advance", "forget", "note_forward", "register", "set_clock"]

_CLOCKS = ("optimizer", "manual")
_MANUAL = "_float8_manual"
_NO_BACKWARD = -1

_layers: dict[int, weakref.ref[Any]] = {}
"""Every layer with float8 state, in the order in which they came to be: the same on all ranks."""
_given_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The process groups that were given, by layer. Not kept in the layer: they cannot be copied."""
_arenas: list[Arena] = []
_lock = threading.RLock()


@dataclass
class _Clock:
    """What the clock remembers between two calls.

    Args:
        num_registered: how many layers were registered so far.
        num_manual: how many times a clock was chosen so far.
        is_hooked: whether the hook is in place.
        is_stale: whether layers came since the arenas were made.
        outermost: the backward in which a forward is recomputed, by its number; what steps inside it waits for its end.
        queued: the last backward at whose end the state moves on.
        is_due: whether an optimizer stepped inside a backward that is not over.
        has_warned: whether the warning about ranks without a group was given.
        num_waiting: how many forwards of layers there were before the state first moved on; -1 once it has.
    """

    num_registered: int = 0
    num_manual: int = 0
    is_hooked: bool = False
    is_stale: bool = True
    outermost: int = _NO_BACKWARD
    queued: int = _NO_BACKWARD
    is_due: bool = False
    has_warned: bool = False
    num_waiting: int = 0


_clock = _Clock()


def register(layer: Any) -> None:
    """Makes the clock know a layer, which has, or is about to have, float8 state. Knowing it twice does no harm."""
    with _lock:
        key = _clock.num_registered
        _clock.num_registered += 1
        _layers[key] = weakref.ref(layer, lambda _: _layers.pop(key, None))
        _clock.is_stale = True
        if not _clock.is_hooked:
            register_optimizer_step_post_hook(_after_step)
            _clock.is_hooked = True


def set_clock(model: nn.Module, clock: str = "optimizer", *, group: Any = None) -> None:
    """Chooses what moves the float8 state of a model on, and which ranks share it.

    Args:
        model: a model with float8 layers.
        clock: `"optimizer"`: every step of an optimizer of PyTorch, which is how every model begins. `"manual"`: calls
            of `advance` only, for optimizers that are not PyTorch's, or to choose the moment.
        group: the process group whose ranks train this model together. `None`: that of the FSDP mesh or of the
            DistributedDataParallel around it, found when the state first moves on.

    Raises:
        ModelError: the clock is unknown, or the model has no layer with float8 state.

    Example:
        >>> import narrowcast
        >>> model = narrowcast.apply(nn.Linear(16, 16), "float8")
        >>> set_clock(model, "manual")
        >>> _ = model(torch.ones(1, 16))
        >>> advance(model)
        >>> model.float8_scale[0]
        tensor(448.)
    """
    if clock not in _CLOCKS:
        raise ModelError("Clock is unknown", got={"clock": clock}, expected="'optimizer' or 'manual'")
    layers = _layers_of(model)
    with _lock:
        _clock.num_manual += 1
        manual = _clock.num_manual if clock == _CLOCKS[1] else None  # a number that tells models apart
        for layer in layers:
            layer.__dict__[_MANUAL] = manual
            if group is None:
                _given_groups.pop(layer, None)
            else:
                _given_groups[layer] = group
        _clock.is_stale = True


def advance(model: nn.Module) -> None:
    """Moves the float8 state of a model on, as an optimizer step does. Needed with `set_clock(model, "manual")` only.

    With several ranks, all of them have to call it.

    Raises:
        ModelError: the model has no layer with float8 state.
    """
    chosen = {id(layer) for layer in _layers_of(model)}
    with _alone():
        _advance([arena for arena in _current() if any(id(layer) in chosen for layer in arena.living())], chosen)


def forget(optimizer: Optimizer) -> None:
    """Drops what layers have seen since the last advance: the step of `optimizer` was skipped.

    That concerns the layers whose parameters it trains, and those that nobody trains, which may be of the same model.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with torch.no_grad():
        for layer in _living():
            own = [parameter for parameter in layer._parameters.values() if parameter is not None]
            if layer.__dict__.get(_MANUAL) is None and (
                any(id(parameter) in trained for parameter in own) or not any(p.requires_grad for p in own)
            ):
                layer.float8_pending_amax.zero_()


def note_forward() -> None:
    """Tells the clock that a layer's forward runs while it trains.

    A forward inside a backward is a recomputation. An optimizer that steps inside the same backward must not move the
    state on before the last of them, and the innermost backward, in which it steps, ends before that.
    """
    if _clock.num_waiting >= 0 and torch.is_grad_enabled():
        _clock.num_waiting += 1
        if _clock.num_waiting > MANY_PASSES * len(_layers):
            _clock.num_waiting = -1
            warnings.warn(_NO_STEP, stacklevel=2)
    task = torch._C._current_graph_task_id()
    if task == _NO_BACKWARD:
        if _clock.is_due or _clock.outermost != _NO_BACKWARD:  # a backward that did not come to its end
            _settle()
    elif _clock.outermost == _NO_BACKWARD:
        _clock.outermost = task
        _engine().queue_callback(_settle)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook: a step of any optimizer of PyTorch is over."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        forget(optimizer)  # a fused optimizer was told to skip, and calls the hook all the same
        return
    _clock.is_due = True
    task = torch._C._current_graph_task_id()
    if task == _NO_BACKWARD:
        _settle()
    elif _clock.outermost == _NO_BACKWARD and _clock.queued != task:
        _clock.queued = task
        _engine().queue_callback(_settle)


def _settle() -> None:
    """Moves the state on if an optimizer stepped since it last did."""
    _clock.outermost = _NO_BACKWARD
    if _clock.is_due:
        _clock.is_due = False
        with _alone():
            _advance([arena for arena in _current() if not arena.is_manual])


def _engine() -> Any:
    return torch.autograd.Variable._execution_engine


def _advance(arenas: list[Arena], only: set[int] | None = None) -> None:
    if arenas:
        _clock.num_waiting = -1
    with torch.no_grad():
        for arena in arenas:
            if not arena.groups and not _clock.has_warned and _num_ranks() > 1 and arena.has_seen():
                _clock.has_warned = True
                warnings.warn(_NO_GROUP, stacklevel=2)
        advance_all(arenas, only)


def _alone() -> AbstractContextManager[Any]:
    """Keeps other threads from making arenas anew out of some that move on, which would lose the step.

    Not with several ranks: they wait for each other, and with threads that wait as well might do so for ever.
    """
    return _lock if _num_ranks() == 1 else nullcontext()


_NO_GROUP = (
    "float8 layers train on several ranks and none of them knows with whom, so each rank keeps scales of its own. Give "
    "the ranks that train this model together: narrowcast.torch.set_clock(model, group=...)."
)


_NO_STEP = (
    "float8 layers train, and their state has not moved on once, so that they scale by the present data. The optimizer "
    "may be none of PyTorch's: call narrowcast.torch.set_clock(model, 'manual'), and narrowcast.torch.advance(model) "
    "after each of its steps."
)
MANY_PASSES = 256
"""After so many passes of every layer in training, without a step of an optimizer, a warning is given, once."""


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _layers_of(model: nn.Module) -> list[Any]:
    found = [module for module in model.modules() if PENDING in module.__dict__]
    if not found:
        raise ModelError(
            "Model has no layer with float8 state",
            got={"type": type(model).__name__},
            expected="a model with a layer under the mode 'float8'",
            fix='Apply it first: narrowcast.apply(model, "float8")',
        )
    return found


def _current() -> list[Arena]:
    """The arenas, made anew where layers came, or where their buffers are no longer those of their arena."""
    with _lock:
        if _clock.is_stale or not all(arena.is_current() for arena in _arenas):
            _arenas[:] = _make_arenas()
            _clock.is_stale = False
        return list(_arenas)


def _make_arenas() -> list[Arena]:
    around: dict[int, Any] = {}
    if is_shared := _num_ranks() > 1:
        # What is reduced has one row a role, so layers that are gone must be gone on all ranks alike.
        gc.collect()
        wrapper = nn.parallel.DistributedDataParallel
        for found in gc.get_objects():
            if issubclass(type(found), wrapper):
                around.update((id(module), found) for module in found.modules())
    chosen: dict[Any, list[Any]] = {}
    groups_of: dict[Any, tuple[Any, ...]] = {}
    for layer in _living():
        groups = _groups_of(layer, around.get(id(layer))) if is_shared else ()
        key = (
            layer.float8_scale.device,
            layer.float8_amax_history.shape[1],
            layer._float8_margin,
            layer._float8_use_max,
            layer.__dict__.get(_MANUAL),
            tuple(group.group_name for group in groups),
        )
        chosen.setdefault(key, []).append(layer)
        groups_of[key] = groups
    with torch.inference_mode(False), torch.no_grad():
        return [Arena(layers, groups_of[key], is_manual=key[4] is not None) for key, layers in chosen.items()]


def _living() -> Iterator[Any]:
    """Every layer that has state with values, once, in the order of registration."""
    seen: set[int] = set()
    for reference in list(_layers.values()):
        layer = reference()
        if layer is None or id(layer) in seen or PENDING not in layer.__dict__ or layer.float8_scale.is_meta:
            continue
        seen.add(id(layer))
        yield layer


def _groups_of(layer: Any, wrapper: Any) -> tuple[Any, ...]:
    """The process groups over which a layer's amaxes are brought to their maximum."""
    given = _given_groups.get(layer)
    if given is not None:
        return (given,)
    for parameter in layer._parameters.values():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            return tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    return () if wrapper is None else (wrapper.process_group,)
