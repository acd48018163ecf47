"""Which modules share a parameter, and which only share memory.

A tie is one Parameter registered twice, or two Parameters that show the same storage at the same offset with the same
shape and strides. Anything else that overlaps (a transposed view) shares memory and is no tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Group", "shared_memory", "ties"]


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that are one site.

    Args:
        modules: their indices, in order.
        tensors: one tuple for each shared tensor: `(index of the module, name)` of every place it has.
    """

    modules: tuple[int, ...]
    tensors: tuple[tuple[tuple[int, str], ...], ...] = ()


def _storage(tensor: Tensor) -> int | None:
    """An identity of the tensor's storage that also holds on the meta device, where every `data_ptr` is 0."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # uninitialized, or a subclass without storage
        return None


def _view(tensor: Tensor) -> Any:
    storage = _storage(tensor)
    if storage is None:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def ties(modules: Sequence[Mapping[str, Tensor]]) -> list[Group]:
    """Groups modules by the parameters they share.

    Args:
        modules: the parameters of each module by name.

    Returns:
        Groups in the order of their first module; a module that shares nothing is a group of its own.
    """
    # Few tensors are shared: only those get a list, since a hundred thousand lists keep the garbage collector busy.
    first_place: dict[Any, tuple[int, str]] = {}
    shared_places: dict[Any, list[tuple[int, str]]] = {}
    for index, parameters in enumerate(modules):
        for name, tensor in parameters.items():
            key = _view(tensor)
            place = (index, name)
            first = first_place.setdefault(key, place)
            if first is not place:
                shared_places.setdefault(key, [first]).append(place)
    parent = list(range(len(modules)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    shared = list(shared_places.values())
    for places in shared:
        lowest = root(places[0][0])
        for index, _ in places[1:]:
            other = root(index)
            lowest, other = min(lowest, other), max(lowest, other)
            parent[other] = lowest
    groups: dict[int, list[int]] = {}
    for index in range(len(modules)):
        groups.setdefault(root(index), []).append(index)
    tensors: dict[int, list[tuple[tuple[int, str], ...]]] = {}
    for places in shared:
        tensors.setdefault(root(places[0][0]), []).append(tuple(places))
    return [Group(tuple(group), tuple(tensors.get(first, ()))) for first, group in groups.items()]


def shared_memory(modules: Sequence[Mapping[str, Tensor]]) -> dict[int, tuple[tuple[int, str], ...]]:
    """Finds parameters that overlap in memory and are not tied.

    Args:
        modules: the parameters of each module by name.

    Returns:
        For the index of each module concerned, the `(index, name)` of the parameters its own overlap with.
    """
    first_view: dict[int, tuple[int, str, Tensor]] = {}
    by_storage: dict[int, list[tuple[int, str, Tensor]]] = {}
    for index, parameters in enumerate(modules):
        for name, tensor in parameters.items():
            storage = _storage(tensor)
            if storage is not None:
                view = (index, name, tensor)
                first = first_view.setdefault(storage, view)
                if first is not view:
                    by_storage.setdefault(storage, [first]).append(view)
    found: dict[int, dict[tuple[int, str], None]] = {}
    for views in by_storage.values():
        spans = [(*_span(tensor), index, name, _view(tensor)) for index, name, tensor in views]
        spans.sort(key=lambda span: span[:4])
        open_spans: list[tuple[int, int, int, str, Any]] = []
        for span in spans:
            open_spans = [other for other in open_spans if other[1] > span[0]]
            for other in open_spans:
                if other[4] != span[4]:
                    found.setdefault(span[2], {})[other[2], other[3]] = None
                    found.setdefault(other[2], {})[span[2], span[3]] = None
            open_spans.append(span)
    return {index: tuple(others) for index, others in found.items()}


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of the storage that the tensor spans, from (inclusive) and to (exclusive)."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return start, start
    last = sum(int((length - 1) * stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size
