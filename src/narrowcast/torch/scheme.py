"""Schemes: what carries a policy out at a module of one kind, and how modules change into their carried form and back.

A scheme is found by `(mode, kind)`. It judges from data alone (`judge`), builds a `Change` without touching the module
(`prepare`), and knows the way back (`undo`). `commit` makes all changes or none.

A module keeps its identity: only its class and its `__dict__` are exchanged, so hooks, references held elsewhere,
shared modules and optimizers stay valid. The class that carries a policy is a subclass of the module's own class
with the same name, made by `carrying_class`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy, registry
from narrowcast.plan.carrier import Verdict
from narrowcast.plan.tree import Member, Site

__all__ = [
    "Carried",
    "Change",
    "Scheme",
    "carried_modes",
    "carrying_class",
    "commit",
    "find",
    "original_class",
    "register",
]


class Carried:
    """The base of every class that carries a policy: what it adds to the module's own class.

    The policy stands in the instance's `__dict__` as `_dtype_policy`.
    """

    _dtype_policy: DTypePolicy
    _narrowcast_base: ClassVar[type[nn.Module]]
    _narrowcast_mixin: ClassVar[type[Carried]]

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The policy that this module carries out."""
        return self._dtype_policy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Code that makes another module of its own class (`self.__class__(...)`, a slice of a Sequential) gets a plain
        # one.
        object.__setattr__(self, "__class__", self._narrowcast_base)
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The carrying class is made at run time, so pickle is told how to make it again.
        state = self.__getstate__()
        return _rebuild, (self._narrowcast_mixin, self._narrowcast_base), state


def _rebuild(mixin: type[Carried], base: type[nn.Module]) -> nn.Module:
    cls = carrying_class(mixin, base)
    return cls.__new__(cls)


_CLASSES: dict[tuple[type[Carried], type[nn.Module]], type[nn.Module]] = {}


def carrying_class(mixin: type[Carried], base: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of `base` that carries a policy by `mixin`; one class for each pair.

    Args:
        mixin: a subclass of `Carried` whose methods (`forward`, ...) come before those of `base`.
        base: the module's own class, not one that already carries a policy.
    """
    known = _CLASSES.get((mixin, base))
    if known is not None:
        return known
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_narrowcast_base": base,
        "_narrowcast_mixin": mixin,
    }
    # Two threads may both come here; one class has to win for all modules.
    return _CLASSES.setdefault((mixin, base), type(base.__name__, (mixin, base), namespace))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that `module` had before it carried a policy; its own class if it carries none."""
    return module._narrowcast_base if isinstance(module, Carried) else type(module)


@dataclass
class Change:
    """A module's next form, built and not yet in place.

    Args:
        module: the module; unchanged until `commit`.
        new_class: the class it will have.
        new_dict: the `__dict__` it will have, complete; made from a copy, with `_parameters` and `_buffers` of its own.
        new_data: parameters that stay the same object and get other data (another dtype): `(parameter, data)`.
    """

    module: nn.Module
    new_class: type[nn.Module]
    new_dict: dict[str, Any]
    new_data: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Change:
        """Starts a change that leaves everything as it is, on copies of the module's own dicts."""
        new_dict = dict(module.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            new_dict[name] = dict(new_dict[name])
        new_dict["_non_persistent_buffers_set"] = set(new_dict["_non_persistent_buffers_set"])
        return cls(module, type(module), new_dict)


def commit(changes: Iterable[Change]) -> Callable[[], None]:
    """Puts all changes in place, or none: an error or an interrupt half way puts everything back.

    Returns:
        A function that takes the changes back. It holds the old tensors until it is dropped.
    """
    classes: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
    data: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []

    def roll_back() -> None:
        for parameter, old_data, old_grad in reversed(data):
            parameter.grad = None
            parameter.data = old_data
            parameter.grad = old_grad
        for module, old_class, old_dict in reversed(classes):
            object.__setattr__(module, "__dict__", old_dict)
            object.__setattr__(module, "__class__", old_class)

    try:
        for change in changes:
            module = change.module
            classes.append((module, type(module), module.__dict__))
            object.__setattr__(module, "__dict__", change.new_dict)
            object.__setattr__(module, "__class__", change.new_class)
            for parameter, new_data in change.new_data:
                grad = parameter.grad
                data.append((parameter, parameter.data, grad))
                # A gradient of another dtype than its parameter is refused by torch, so it follows.
                parameter.grad = None
                parameter.data = new_data
                if grad is not None and grad.shape == new_data.shape:
                    parameter.grad = grad.to(new_data.dtype)
    except BaseException:
        roll_back()
        raise
    return roll_back


class Scheme(ABC):
    """What carries out one mode at one kind of module. Stateless; one instance for each `(mode, kind)`."""

    @abstractmethod
    def judge(self, site: Site, member: Member, policy: DTypePolicy) -> Verdict:
        """Says from data alone whether `policy` can be carried out at `member` of `site`. See `Verdict`."""

    @abstractmethod
    def prepare(
        self,
        module: nn.Module,
        policy: DTypePolicy,
        *,
        stored: MutableMapping[str, Tensor] | None = None,
        shared: MutableMapping[Any, Any] | None = None,
    ) -> list[Change]:
        """Builds what `module` becomes under `policy`, without touching the module.

        One change, or several where the site owns a subtree (`out_proj` of an attention module).

        Args:
            module: carries no policy, or the float policy that `policy` starts from.
            policy: its source resolved (never `keep`).
            stored: the stored form's tensors by local name, when loading: used as they are, nothing is quantized. Those
                taken are removed from the mapping.
            shared: tensors already made for a tied parameter, by whatever key the scheme chooses, for all members of a
                site.

        Raises:
            WeightError: a weight holds NaN or infinity.
        """

    @abstractmethod
    def undo(self, module: nn.Module, *, shared: MutableMapping[Any, Any] | None = None) -> list[Change]:
        """Builds what `module` was before: its own class, and its parameters in float (dequantized if need be)."""


_SCHEMES: dict[tuple[str, str], Scheme] = {}


def register(mode: str, kinds: Iterable[str], scheme: Scheme) -> None:
    """Registers `scheme` for a mode at each of `kinds`. Called once a file, when the framework package is imported."""
    for kind in kinds:
        _SCHEMES[mode, kind] = scheme


def find(policy: DTypePolicy, kind: str) -> Scheme | None:
    """Returns the scheme that carries `policy` out at `kind`, or `None`."""
    return _SCHEMES.get((registry.mode_of(policy).name, kind))


def carried_modes() -> tuple[str, ...]:
    """Returns the names of the modes that have a scheme for at least one kind."""
    return tuple(dict.fromkeys(mode for mode, _ in _SCHEMES))
