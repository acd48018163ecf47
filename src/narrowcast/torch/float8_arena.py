"""The state of many float8 layers as three tensors, which move on at once.

The layers' own buffers are parts of them as long as nobody replaces one.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from narrowcast.numerics.scaling import LARGEST_FLOAT32
from narrowcast.torch.float8_state import HISTORY, INDEX, PENDING, ROLES, SCALE

__all__ = ["Arena", "advance_all"]


class Arena:
    """Layers whose state moves on as one tensor: on one device, with one length of history and one group of ranks.

    Args:
        layers: the layers.
        groups: the process groups to reduce over, one after the other.
        is_manual: whether the clock is `advance`.
    """

    def __init__(self, layers: list[Any], groups: tuple[Any, ...], *, is_manual: bool) -> None:
        self.groups = groups
        self.is_manual = is_manual
        self._use_max = bool(layers[0]._float8_use_max)
        self._layers = [weakref.ref(layer) for layer in layers]
        self.pending = [layer.__dict__[PENDING] for layer in layers]
        self.scale = torch.cat([layer._buffers[SCALE] for layer in layers])
        self.history = torch.cat([layer._buffers[HISTORY] for layer in layers])
        self.index = torch.cat([layer._buffers[INDEX] for layer in layers]).unsqueeze(1)
        row = 0
        for layer, pending in zip(layers, self.pending, strict=True):
            own = slice(row, row + pending.shape[0])
            # Parts of one tensor, save for what forward and backward write into: `torch.compile` takes tensors that are
            # written to and share memory for one.
            layer._buffers[SCALE] = _part(self.scale[own])
            layer._buffers[HISTORY] = _part(self.history[own])
            layer._buffers[INDEX] = _part(self.index[own, 0])
            row = own.stop
        self._tensors = _tensors(layers)
        self._addresses = [history.data_ptr() for history in self._tensors[0]]
        largest = [to.largest * 2.0 ** -layers[0]._float8_margin for _, to in ROLES]
        self._largest = self.scale.new_tensor(largest * (row // len(largest)))

    def living(self) -> Iterator[Any]:
        """The layers that still exist."""
        for reference in self._layers:
            layer = reference()
            if layer is not None:
                yield layer

    def is_current(self) -> bool:
        """Whether the layers' buffers are still the ones that this moves on."""
        # Asked at every step for every layer, so that loops are written as the interpreter runs them fastest.
        layers = [reference() for reference in self._layers]
        if None in layers:
            living = [index for index, layer in enumerate(layers) if layer is not None]
            present = _tensors([layers[index] for index in living])
            expected = [[tensors[index] for index in living] for tensors in self._tensors]
            addresses = [self._addresses[index] for index in living]
        else:
            present, expected, addresses = _tensors(layers), self._tensors, self._addresses
        return all(
            all(map(operator.is_, ours, theirs)) for ours, theirs in zip(present, expected, strict=True)
        ) and addresses == [history.data_ptr() for history in present[0]]

    def has_seen(self) -> bool:
        """Whether any layer has seen something since the last advance."""
        return any(bool(pending.any()) for pending in self.pending)

    def seen(self, only: set[int] | None = None) -> Tensor:
        """Returns what the layers have seen since the last advance, a row a role: float32, shape `(rows,)`, a copy.

        Args:
            only: the ids of the layers that are to move; `None`: all. The rows of others are 0.
        """
        pending = torch.cat(self.pending)
        if only is not None:
            # In the copy: what other layers see meanwhile, in other threads, merges into their own.
            rows = torch.split(pending, [len(own) for own in self.pending])
            for own, reference in zip(rows, self._layers, strict=True):
                if id(reference()) not in only:
                    own.zero_()
        return pending

    def advance(self, pending: Tensor, only: set[int] | None = None) -> None:
        """Moves the layers on, in place; see `narrowcast.numerics.delayed_scaling.advance`.

        Args:
            pending: what `seen` returned, brought to its maximum over the ranks.
            only: the ids of the layers to move; `None`: all.
        """
        moved = self.pending
        if only is not None:
            pairs = zip(self.pending, self._layers, strict=True)
            moved = [own for own, reference in pairs if id(reference()) in only]
        moves = pending > 0
        entry = torch.where(moves, pending, self.history.gather(1, self.index)[:, 0])
        self.history.scatter_(1, self.index, entry.unsqueeze(1))
        magnitude = self.history.amax(1) if self._use_max else pending
        fresh = (self._largest / magnitude).clamp_max_(LARGEST_FLOAT32)
        torch.where(moves, fresh, self.scale, out=self.scale)
        self.index.add_(moves.unsqueeze(1)).remainder_(self.history.shape[1])
        torch._foreach_zero_(moved)


def advance_all(arenas: list[Arena], only: set[int] | None = None) -> None:
    """Moves the layers of some arenas on, with one all-reduce for all that lie on one device and share their groups.

    Args:
        arenas: those to move, in the same order on all ranks.
        only: the ids of the layers to move; `None`: all.
    """
    pending = [arena.seen(only) for arena in arenas]
    shared: dict[Any, list[int]] = {}
    for position, arena in enumerate(arenas):
        if arena.groups:
            key = (arena.scale.device, tuple(group.group_name for group in arena.groups))
            shared.setdefault(key, []).append(position)
    for positions in shared.values():
        together = torch.cat([pending[position] for position in positions])
        for group in arenas[positions[0]].groups:
            torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group)
        rows = torch.split(together, [len(pending[position]) for position in positions])
        for position, own in zip(positions, rows, strict=True):
            pending[position] = own
    for arena, own in zip(arenas, pending, strict=True):
        arena.advance(own, only)


def _part(view: Tensor) -> Tensor:
    """The memory of a view as a tensor that knows of no more than that.

    Copies, pickles and files of a view hold all that it is a view of, and safetensors refuses it.
    """
    return from_dlpack(view)


def _tensors(layers: list[Any]) -> list[list[Any]]:
    """The four tensors of every layer, by kind, the histories first; `None` where a layer has lost one."""
    buffers = [layer._buffers for layer in layers]
    pending = [layer.__dict__.get(PENDING) for layer in layers]
    return [*([own.get(name) for own in buffers] for name in (HISTORY, SCALE, INDEX)), pending]
