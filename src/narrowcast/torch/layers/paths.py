"""Where a layer stands: the attribute path from the root of its model, or from a layer that is being looked at.

PyTorch's modules do not know their parents. Each registration of a child is noted here, weakly, and believed only as
far as the parent still has the child: the path is read from the tree as it is now.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

__all__ = ["adopt", "ancestors", "frame", "in_frame", "path_of"]

_PARENTS: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref[nn.Module], str]]] = weakref.WeakKeyDictionary()
_frame: ContextVar[nn.Module | None] = ContextVar("narrowcast_path_frame", default=None)

_WRAPPERS = frozenset({"OptimizedModule", "DistributedDataParallel", "DataParallel"})
"""Wrappers around a whole model, by name so that none of them is imported: the model below stays the root."""


def _note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Notes that `parent` has `child`; called by PyTorch at every registration of a module."""
    if child is None or type(parent).__name__ in _WRAPPERS or not isinstance(parent.__dict__.get("_modules"), dict):
        return
    noted = _PARENTS.setdefault(child, []) if _has_hash(child) else []
    if not any(ref() is parent and known == name for ref, known in noted):
        noted.append((weakref.ref(parent), name))


register_module_module_registration_hook(_note)


def _has_hash(module: nn.Module) -> bool:
    """Whether it can be noted: a module that compares by value has no hash, and knows not what is above it."""
    return type(module).__hash__ is not None


def adopt(parent: nn.Module) -> None:
    """Notes the children of a module that was copied or unpickled, which registers nothing."""
    pending = [parent]
    while pending:
        module = pending.pop()
        for name, child in module._modules.items():
            if child is not None and not (_has_hash(child) and child in _PARENTS):
                _note(module, name, child)
                pending.append(child)


def _parents(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parents that have `module` now, each with the name it has there, first noted first."""
    noted = _PARENTS.get(module) if _has_hash(module) else None
    if not noted:
        return []
    found: list[tuple[nn.Module, str]] = []
    for ref, name in noted:
        parent = ref()
        if parent is None:
            continue
        if parent._modules.get(name) is not module:
            # Lists renumber their modules.
            names = [other for other, child in parent._modules.items() if child is module]
            if not names:
                continue
            name = names[0]
        found.append((parent, name))
    if len(found) < len(noted) or any(name != known for (_, name), (_, known) in zip(found, noted, strict=True)):
        _PARENTS[module] = [(weakref.ref(parent), name) for parent, name in found]
    return found


def ancestors(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields every module above `module`, nearest first, with the path from there down to it."""
    seen = {id(module)}
    path = ""
    while parents := _parents(module):
        parent, name = parents[0]
        if id(parent) in seen:
            return
        seen.add(id(parent))
        path = f"{name}/{path}" if path else name
        yield parent, path
        module = parent


@contextmanager
def frame(module: nn.Module) -> Iterator[None]:
    """Within the block, paths of modules below `module` begin there."""
    token = _frame.set(module)
    try:
        yield
    finally:
        _frame.reset(token)


def in_frame() -> bool:
    """Says whether paths begin at some module's frame at present."""
    return _frame.get() is not None


def path_of(module: nn.Module) -> str:
    """Returns the attribute path of a module, joined by `/`; `''` for the root.

    It begins at the root, or at the module whose `frame` is open if that is above.

    Example:
        >>> net = nn.Sequential(nn.ModuleDict({"head": nn.ReLU()}))
        >>> path_of(net[0]["head"])
        '0/head'
        >>> with frame(net[0]):
        ...     path_of(net[0]["head"])
        'head'
    """
    start = _frame.get()
    if start is not None:
        path = _path_from(start, module, set())
        if path is not None:
            return "/".join(path)
    whole = ""
    for _, whole in ancestors(module):  # noqa: B007 - the last one counts
        pass
    return whole


def _path_from(start: nn.Module, module: nn.Module, seen: set[int]) -> list[str] | None:
    """The names on a way from `start` down to `module`; a shared module has several ways up."""
    if module is start:
        return []
    if id(module) in seen:
        return None
    seen.add(id(module))
    for parent, name in _parents(module):
        above = _path_from(start, parent, seen)
        if above is not None:
            return [*above, name]
    return None
