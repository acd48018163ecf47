"""`keep` where other layers' policies change what flows in: floating inputs are cast to the layer's present dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.errors import UnsupportedError
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.tree import KINDS, Member, Site
from narrowcast.torch.fused import turn_off
from narrowcast.torch.inputs import cast_arguments
from narrowcast.torch.kinds import owned_children
from narrowcast.torch.scheme import Carried, Change, Scheme, carrying_class, original_class, register

__all__ = ["InputCast", "KeepScheme"]


class InputCast(Carried):
    """Casts a kept layer's floating inputs to the dtype of its largest floating parameter; its forward is its own.

    The dtype is read at each call, because a kept layer may be converted (`.half()`) like any other.
    """

    _narrowcast_follows: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        base = cls.__dict__.get("_narrowcast_base")
        if base is None:
            super().__init_subclass__(**kwargs)
        else:
            turn_off(cls, base)
            cls.forward = _casting_inputs(base.forward)  # type: ignore[attr-defined]


def _casting_inputs(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_arguments(args, kwargs, _present_dtype(self))
        return own(self, *args, **kwargs)

    return forward


def _present_dtype(module: Any) -> torch.dtype:
    owner = module
    *children, name = module._narrowcast_follows.split(".")
    for child in children:
        owner = owner._modules[child]
    return getattr(owner, name).dtype  # type: ignore[no-any-return]


class KeepScheme(Scheme):
    """The scheme of `keep` at any kind of module that has floating parameters of its own."""

    def judge(self, site: Site, member: Member, policy: DTypePolicy) -> Verdict:
        """A kept site stays as it is; nothing stands in the way."""
        return Verdict(Status.APPLIED, bytes_after=sum(parameter.num_bytes for parameter in member.parameters))

    def prepare(
        self,
        module: nn.Module,
        policy: DTypePolicy,
        *,
        stored: MutableMapping[str, Tensor] | None = None,
        shared: MutableMapping[Any, Any] | None = None,
    ) -> list[Change]:
        """Builds the form that casts its inputs; no change where the module has no floating parameter to go by.

        Raises:
            UnsupportedError: the module does not run the forward of its class, so its inputs cannot be cast.
        """
        if isinstance(module, ScriptModule) or "forward" in module.__dict__:
            raise UnsupportedError(
                f"{type(module).__name__} is kept, and its inputs cannot be cast to its dtype",
                expected="a module that runs the forward of its class (no TorchScript, no replaced forward)",
                fix="Give the layers before it policies that return its dtype, or use the module it was made from",
            )
        follows = _largest(module)
        if follows is None:
            return []
        change = Change.of(module)
        change.new_class = carrying_class(InputCast, original_class(module))
        change.new_dict.update(_dtype_policy=policy, _narrowcast_follows=follows)
        return [change]

    def undo(self, module: nn.Module, *, shared: MutableMapping[Any, Any] | None = None) -> list[Change]:
        """Gives the module its own class back."""
        if not isinstance(module, InputCast):
            return []
        change = Change.of(module)
        change.new_class = original_class(module)
        for name in ("_dtype_policy", "_narrowcast_follows"):
            change.new_dict.pop(name, None)
        return [change]


def _largest(module: nn.Module) -> str | None:
    """The dotted name of the largest floating parameter that the site of `module` owns."""
    sizes = {}
    for prefix, owner in [("", module), *((f"{n}.", module._modules[n]) for n in owned_children(module))]:
        if owner is not None:
            for name, parameter in owner.named_parameters(recurse=bool(prefix), remove_duplicate=False):
                if parameter.is_floating_point():
                    sizes[prefix + name] = parameter.numel()
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


register("keep", KINDS, KeepScheme())
