"""What `observe` reads of a model: its sites, their weights, and what flows through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.dtype_policies import dtypes, keep
from narrowcast.observe.narrowing import Forms
from narrowcast.observe.statistics import Narrow
from narrowcast.plan.tree import Member
from narrowcast.torch.kinds import working_module
from narrowcast.torch.tree import tree

__all__ = [
    "NUM_COMPARED_ROWS",
    "first_floating",
    "in_float32",
    "is_inside_backward",
    "is_lossy",
    "is_transposed",
    "sites",
    "weights",
    "without_autocast",
]

NUM_COMPARED_ROWS = 16
"""Rows of a linear layer's output that are computed again in float32 to see how far the layer is off."""


def sites(model: nn.Module) -> Iterator[tuple[nn.Module, Member]]:
    """Every module that carries a policy; of a layer with a core, the core, which multiplies."""
    for site in tree(model):
        for member in site.members:
            if member.policy is not None and member.policy != keep:
                yield working_module(model.get_submodule(member.paths[0].replace("/", "."))), member


def weights(module: nn.Module) -> list[Tensor]:
    """The module's weights; all its floating parameters where none is called one."""
    named = [(name, p) for name, p in module.named_parameters(recurse=False) if p.is_floating_point()]
    return [p for name, p in named if "weight" in name] or [p for _, p in named]


def first_floating(value: Any) -> Tensor | None:
    """The first floating tensor in arguments or results, at any depth of plain containers."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    return next((found for item in value if (found := first_floating(item)) is not None), None)


def in_float32(
    member: Member, module: nn.Module, forms: Forms, given: Tensor | None, result: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Some rows of a linear layer's output, and the same rows as float32 would have them."""
    weight = getattr(module, "weight", None)
    if member.kind != "linear" or given is None or result is None or not isinstance(weight, nn.Parameter):
        return None
    if given.numel() == 0 or not (is_lossy(weight, forms.weight) or is_lossy(given, forms.input)):
        return None
    rows, outputs = given.reshape(-1, given.shape[-1]), result.reshape(-1, result.shape[-1])
    step = -(-rows.shape[0] // NUM_COMPARED_ROWS)
    wide = weight.t().float() if is_transposed(member) else weight.float()
    bias = getattr(module, "bias", None)
    return outputs[::step], F.linear(rows[::step].float(), wide, bias.float() if isinstance(bias, Tensor) else None)


def is_transposed(member: Member) -> bool:
    """Whether the weight of a linear layer lies as (in, out), as Hugging Face's `Conv1D` has it."""
    return member.kind == "linear" and bool(member.detail("transposed"))


def is_lossy(x: Tensor, narrow: Narrow | None) -> bool:
    """Whether rounding changes the dtype that `x` has."""
    return narrow is not None and dtypes.standardize(x.dtype) != narrow.dtype


def is_inside_backward() -> bool:
    """Says whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def without_autocast(x: Tensor | None) -> AbstractContextManager[Any]:
    """A context in which float32 stays float32, where the code outside runs under `torch.autocast`."""
    if x is None or not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
