"""How a layer's policy is carried out: by the schemes of `narrowcast.torch`, on the module that computes.

A layer that holds a module of PyTorch which computes for it (its core: `nn.Linear` for `Dense`) has its policy carried
out on that. A layer without one carries it itself: its class is exchanged for one that casts what its `call` sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowcast.dtype_policies import DTypePolicy, dtypes
from narrowcast.errors import UnsupportedError
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.torch import scheme
from narrowcast.torch.carried import Transparent
from narrowcast.torch.carrier import TorchCarrier
from narrowcast.torch.kinds import kind_of, working_module
from narrowcast.torch.layers.calls import as_tensors
from narrowcast.torch.layers.policies import without_mode
from narrowcast.torch.norm import UpCast
from narrowcast.torch.shadow import CustomCast
from narrowcast.torch.tree import tree

if TYPE_CHECKING:
    from narrowcast.torch.layers.base import Layer

__all__ = [
    "LayerCast",
    "LayerTransparent",
    "LayerUpCast",
    "bare",
    "carriable",
    "carry",
    "changes_back",
    "changes_to",
    "is_bare",
    "is_empty",
    "judge",
]

_carries: ContextVar[bool] = ContextVar("narrowcast_layers_carry", default=True)
_fills: ContextVar[bool] = ContextVar("narrowcast_layers_fill", default=True)


@contextmanager
def bare(*, values: bool = False) -> Iterator[None]:
    """Within the block, layers are built without a policy and, but for `values`, without values: to be loaded."""
    carries, fills = _carries.set(False), _fills.set(values)
    try:
        yield
    finally:
        _carries.reset(carries)
        _fills.reset(fills)


def is_bare() -> bool:
    """Says whether layers are built without a policy at present."""
    return not _carries.get()


def is_empty() -> bool:
    """Says whether variables are made without values at present."""
    return not _fills.get()


class _LayerPolicy:
    """Leaves the layer its own `dtype_policy`, which can be set."""

    @property
    def dtype_policy(self) -> Any:
        """See `Layer.dtype_policy`."""
        return self._narrowcast_base.dtype_policy.__get__(self)  # type: ignore[attr-defined]

    @dtype_policy.setter
    def dtype_policy(self, policy: Any) -> None:
        self._narrowcast_base.dtype_policy.__set__(self, policy)  # type: ignore[attr-defined]


class LayerCast(_LayerPolicy, CustomCast):
    """A layer with a `call` of its author: arguments and variables in the compute dtype, outputs as they come.

    A layer with `autocast=False` sees its arguments and variables as they are, and so does a layer whose compute dtype
    is not floating. A variable made with `autocast=False` is seen as it is stored.
    """

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is list:
            args, kwargs = as_tensors(args, kwargs)  # a list of numbers is a tensor, and cast as one
        if not self.autocast:  # type: ignore[attr-defined]
            return self._narrowcast_base.forward(self, *args, **kwargs)
        return super()._narrowcast_run(*args, **kwargs)

    def _narrowcast_cast_parameters(self, module: Any, via: torch.dtype, inner: torch.dtype) -> dict[str, Any] | None:
        prefix = "" if module is self else f"{next(n for n, m in self._modules.items() if m is module)}."  # type: ignore[attr-defined]
        weights = self._weights  # type: ignore[attr-defined]
        cast: dict[str, Any] = {}
        changed = False
        for name, tensor in module._parameters.items():
            weight = weights.get(prefix + name)
            if tensor is not None and tensor.is_floating_point() and (weight is None or weight.autocast):
                cast[name] = tensor.to(via)
                changed = changed or cast[name] is not tensor
            else:
                cast[name] = tensor
        return cast if changed else None


class LayerUpCast(_LayerPolicy, UpCast):
    """A layer that computes in float32 at least, from its input as it comes, and returns the compute dtype."""


class LayerTransparent(_LayerPolicy, Transparent):
    """A layer whose `call` only calls its layers: they cast for themselves."""


def carry(layer: Layer) -> None:
    """Has the layer's policy carried out, once: a float policy, or a quantized one where the layer can carry it.

    A layer that cannot carry the mode has the policy that the mode starts from; that is what its `dtype_policy` says.

    Raises:
        UnsupportedError: the policy computes in no dtype that PyTorch has arithmetic for, or its mode is not carried
            out on PyTorch by any kind of layer.
    """
    if is_bare() or layer._carried_policy() is not None:
        return
    policy = carriable(layer, layer._resolved_policy())
    if policy is not None:
        scheme.commit(changes_to(layer, policy))


def carriable(layer: Layer, policy: DTypePolicy) -> DTypePolicy | None:
    """Returns what of a policy a layer can carry: the policy, its source, or nothing.

    Raises:
        UnsupportedError: no kind of layer has the mode on PyTorch yet.
    """
    if policy.quantization_mode is not None and judge(layer, policy).status is not Status.APPLIED:
        policy = without_mode(policy)
    # A layer of integers (a preprocessing step) computes in what it is given: floats are never cast to integers.
    return policy if dtypes.get(str(policy.compute_dtype)).is_floating else None


def judge(layer: Layer, policy: DTypePolicy) -> Verdict:
    """Says whether a layer can carry a policy."""
    return TorchCarrier().judge(tree(layer)[""], policy)


def changes_to(layer: Layer, policy: DTypePolicy) -> list[scheme.Change]:
    """Builds what a layer becomes under a policy that it can carry; see `Scheme.prepare`."""
    shared: dict[Any, Any] = {}
    changes = []
    for module in modules_of(layer):
        found = _scheme(module, policy)
        try:
            changes += found.prepare(module, policy, shared=shared) if found is not None else []
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{type(layer).__name__} at {layer.path!r} cannot have the policy {policy.name!r}: {error.problem}",
                expected=error.expected,
                fix=error.fix,
            ) from error
    return changes


def changes_back(layer: Layer) -> list[scheme.Change]:
    """Builds what a layer was before it carried its policy; see `Scheme.undo`."""
    shared: dict[Any, Any] = {}
    changes = []
    for module in modules_of(layer):
        policy = module.__dict__.get("_dtype_policy")
        found = None if policy is None else _scheme(module, policy)
        changes += found.undo(module, shared=shared) if found is not None else []
    return changes


def modules_of(layer: Layer) -> list[nn.Module]:
    """Returns the modules that carry the layer's policy: its core or itself, and those that share its variable."""
    return [working_module(layer), *layer._tied_modules()]


def _scheme(module: nn.Module, policy: DTypePolicy) -> scheme.Scheme | None:
    has_parameters = any(parameter is not None for parameter in module._parameters.values())
    return scheme.find(policy, kind_of(module, has_parameters=has_parameters))
