"""The tree of a live `torch.nn.Module`, on any device, the meta device too.

No tensor is touched: shapes, dtypes, strides and the identity of storages are enough. A module that is reached by
several paths is one member with several paths; modules that share a parameter are one site.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowcast.dtype_policies import DTypePolicy, dtypes
from narrowcast.errors import ModelError
from narrowcast.plan.tree import Member, Parameter, Site, Tree
from narrowcast.torch.kinds import details_of, float_shapes, kind_of, owned_children, qualified, working_module
from narrowcast.torch.scheme import original_class
from narrowcast.torch.ties import shared_memory, ties

__all__ = ["MAX_PATHS", "tree"]

MAX_PATHS = 1_000_000
"""The most paths that are followed; modules shared within shared modules multiply them."""


def tree(model: nn.Module) -> Tree:
    """Reads a model as a tree of sites, without touching a tensor.

    Args:
        model: any module, on any device; on the meta device it costs no memory.

    Returns:
        Every module as a site, the root (`''`) first, then in the order of registration. `nn.MultiheadAttention` is one
        site with its `out_proj`; a `ParameterList` or `ParameterDict` belongs to the module that holds it.

    Raises:
        ModelError: `model` is no `nn.Module`, a child's name holds a `/`, or there are more than `MAX_PATHS` paths.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> [(site.path, site.kind) for site in tree(net)]
        [('', 'container'), ('0', 'linear'), ('1', 'other')]
    """
    if not isinstance(model, nn.Module):
        raise ModelError("Model is not a PyTorch module", got={"model": model}, expected="an nn.Module")
    found = list(_walk(model).values())
    tensors = [_tensors(working_module(module)) for module, _ in found]
    prefixes = [paths[0].replace("/", ".") + "." if paths[0] else "" for _, paths in found]
    overlaps = shared_memory(tensors)
    members = []
    pool: dict[Any, Any] = {}
    for index, (module, paths) in enumerate(found):
        others = ", ".join(prefixes[i] + name for i, name in overlaps.get(index, ()))
        members.append(_member(module, tuple(paths), tensors[index], others, pool))
    sites = []
    for group in ties(tensors):
        device = next((_device_name(tensor.device) for i in group.modules for tensor in tensors[i].values()), "")
        tied = tuple(tuple(prefixes[i] + name for i, name in places) for places in group.tensors)
        sites.append(Site(tuple(members[i] for i in group.modules), device, tied))
    return Tree(tuple(sites), "torch", original_class(model).__name__)


def _walk(model: nn.Module) -> dict[int, tuple[nn.Module, list[str]]]:
    """Every module that is a site, with all its paths, in pre-order; a stack of its own, since models nest deeply."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    above: list[int] = []  # the ids of the modules on the way here: a module inside itself is not entered again
    stack: list[tuple[nn.Module, str, int]] = [(model, "", 0)]
    num_paths = 0
    while stack:
        module, path, depth = stack.pop()
        del above[depth:]
        if id(module) in above:
            continue
        above.append(id(module))
        num_paths += 1
        if num_paths > MAX_PATHS:
            raise ModelError(
                f"Model has more than {MAX_PATHS:,} paths",
                expected="fewer; modules shared within shared modules multiply them",
                fix="Plan a part of the model",
            )
        if id(module) in found:
            found[id(module)][1].append(path)
        else:
            found[id(module)] = (module, [path])
        if not module._modules:
            continue
        owned = owned_children(module)
        for name, child in reversed(module._modules.items()):
            if child is None or name in owned:
                continue
            if "/" in name:
                raise ModelError(
                    f"Name of a child of {path or 'the root'!r} holds a '/', which separates the parts of a path",
                    got={"name": name},
                    fix="Rename the child",
                )
            stack.append((child, f"{path}/{name}" if path else name, depth + 1))
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a site by name; those of the children it owns with their dotted names."""
    tensors: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None}
    for child_name, child in _owned(module):
        tensors |= {f"{child_name}.{name}": p for name, p in child.named_parameters(remove_duplicate=False)}
    if _is_quantized(module):
        # The stored form stands in for the float parameter of the same name, so that ties survive quantizing.
        for name in float_shapes(module):
            form = next((t for stored, t in _stored(module) if stored.startswith(name)), None)
            if form is not None:
                tensors.setdefault(name, form)
    return tensors


def _stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module, those of the children it owns too."""
    yield from ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
    for child_name, child in _owned(module):
        yield from ((f"{child_name}.{name}", b) for name, b in child.named_buffers(remove_duplicate=False))


def _owned(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children that belong to the site of `module`, by name."""
    names = owned_children(module)
    if names:
        # Of the mapping that script modules have, only `items` is sure to work.
        yield from ((name, child) for name, child in module._modules.items() if name in names and child is not None)


def _is_quantized(module: nn.Module) -> bool:
    policy = _policy(module)
    return policy is not None and policy.quantization_mode is not None


def _policy(module: nn.Module) -> DTypePolicy | None:
    return module.__dict__.get("_dtype_policy")


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


@lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return dtypes.standardize(dtype)


def _member(
    module: nn.Module, paths: tuple[str, ...], tensors: dict[str, Tensor], others: str, pool: dict[Any, Any]
) -> Member:
    """One module as a record; equal parts of records come from `pool`, since big models repeat few of them."""
    policy = _policy(working_module(module))
    shapes: Mapping[str, tuple[int, ...]] = {}
    parameters = []
    if policy is not None and policy.quantization_mode is not None:
        # A quantized layer reports the parameters it would have in float, so that its plan reads like any other.
        shapes = float_shapes(module)
        parameters = [Parameter(name, shape, str(policy.variable_dtype)) for name, shape in shapes.items()]
    for name, tensor in tensors.items():
        if name not in shapes and not is_lazy(tensor):
            parameters.append(Parameter(name, tuple(tensor.shape), _dtype_name(tensor.dtype)))
    parameters.sort(key=lambda parameter: "." in parameter.name)  # those of owned children last, in either form
    details = details_of(module)
    if others:
        details["shares_memory"] = others
    return Member(
        paths,
        kind_of(module, has_parameters=bool(tensors)),
        qualified(original_class(module)),
        pool.setdefault(held := tuple(parameters), held),
        policy,
        pool.setdefault(facts := tuple(details.items()), facts),
    )
