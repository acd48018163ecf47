"""What every module under a float policy has: a forward that casts, and parameters that keep their dtype.

`Guarded` holds the parameters in the variable dtype through `.half()`, `.to(dtype)` and `load_state_dict(assign=True)`.
`Cast` puts in place of `forward` one that turns `torch.autocast` off and hands over to `_narrowcast_run`, which each
kind of layer defines. What these classes add to a module's own begins with `_narrowcast`: authors name theirs freely.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import dtypes
from narrowcast.errors import ModelError
from narrowcast.torch.fused import turn_off
from narrowcast.torch.scheme import Carried

__all__ = ["Cast", "Guarded", "GuardedList", "Transparent", "drift"]

_ACCELERATOR = torch.accelerator.current_accelerator()
_AUTOCAST_DEVICES = ("cpu", "cpu" if _ACCELERATOR is None else _ACCELERATOR.type)


class Guarded(Carried):
    """Keeps the module's own floating parameters in the variable dtype, and its buffers in theirs.

    A policy is not overruled from outside: `.half()` or `.to(torch.float16)` on the model converts the layers that have
    none. A device, a memory format and `to_empty` take effect as ever. Where parameters got another dtype behind the
    policy's back (`weight.data = ...`), any of these calls brings them back, and the next forward says so.
    """

    _narrowcast_variable: torch.dtype
    _narrowcast_own_dtypes: frozenset[str] = frozenset()  # parameters that keep the dtype they were made with

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():  # type: ignore[attr-defined]
                child._apply(fn)
        return super()._apply(_keeping_dtypes(self, fn), False)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        for name, parameter in self._parameters.items():  # type: ignore[attr-defined]
            if parameter is not None and parameter.is_floating_point() and name not in self._narrowcast_own_dtypes:
                parameter.data = parameter.data.to(self._narrowcast_variable)


def _keeping_dtypes(module: Any, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn` as `nn.Module._apply` takes it, with the dtype that its result has to have put back."""
    buffers = {id(buffer) for buffer in module._buffers.values()}
    buffers |= {id(module._parameters.get(name)) for name in module._narrowcast_own_dtypes}

    def kept(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        dtype = tensor.dtype if id(tensor) in buffers else module._narrowcast_variable
        if result.dtype is dtype or not tensor.is_floating_point():
            return result
        # From the tensor and not from the result, which has lost digits already; in the result's place and layout.
        kept = torch.empty_like(result, dtype=dtype)
        return kept if tensor.is_meta else kept.copy_(tensor)

    return kept


class GuardedList(Guarded):
    """A `ParameterList` that belongs to a module with a policy."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            items = [self[i] for i in range(*index.indices(len(self)))]  # type: ignore[arg-type]
            # PyTorch's own slice wraps what is no parameter, as the cast ones are, into a new one without a gradient.
            if not all(isinstance(item, nn.Parameter) for item in items):
                return items
        return super().__getitem__(index)  # type: ignore[misc]


class Cast(Guarded):
    """The base of the classes that carry out a float policy; `_narrowcast_run` is what the layer computes.

    Its instances hold the policy as `_dtype_policy` and, for speed, its dtypes as `_narrowcast_compute` and
    `_narrowcast_variable`. `_narrowcast_owned` names children that belong to the site: their parameters are cast too.
    """

    _narrowcast_compute: torch.dtype
    _narrowcast_owned: tuple[str, ...] = ()
    _narrowcast_masks: ClassVar[frozenset[int | str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        base = cls.__dict__.get("_narrowcast_base")
        if base is None:  # one of the mixins, or a class that torch puts above ours (parametrize, fully_shard)
            super().__init_subclass__(**kwargs)
            return
        # A base that keeps a register of its subclasses in __init_subclass__ shall not learn of this one.
        turn_off(cls, base)
        cls._narrowcast_masks = _mask_arguments(base.forward)
        cls.forward = _shielded(base.forward)  # type: ignore[attr-defined]

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _narrowcast_narrow(self, name: str) -> Any:
        """The module's parameter called `name` in the compute dtype; `None` where it has none."""
        # Past nn.Module.__getattr__, which takes a microsecond; a parametrized name is a property of the class.
        parameters = self._parameters  # type: ignore[attr-defined]
        parameter = parameters[name] if name in parameters else getattr(self, name)
        if parameter is None or parameter.dtype is self._narrowcast_compute:
            return parameter
        if parameter.dtype is not self._narrowcast_variable:
            raise drift(self, name, parameter.dtype)
        return parameter.to(self._narrowcast_compute)


class Transparent(Guarded):
    """Carries a policy at a container whose forward only calls its children: they cast for themselves, as in Keras.

    Casting here as well would take digits from the input of a first layer that computes in more of them, or range from
    that of a norm.
    """


def _shielded(own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a carrying class, with the signature of the class's own."""

    # Not its __dict__: marks that torch.compile leaves on a function (`_torchdynamo_orig_callable`) name the function.
    @functools.wraps(own, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            with _autocast_off(_AUTOCAST_DEVICES[0]), _autocast_off(_AUTOCAST_DEVICES[1]):
                return self._narrowcast_run(*args, **kwargs)
        return self._narrowcast_run(*args, **kwargs)

    # Code of its own: torch.compile counts recompilations by code object.
    forward.__code__ = forward.__code__.replace()  # type: ignore[attr-defined]
    return forward


def _autocast_off(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _mask_arguments(own: Callable[..., Any]) -> frozenset[int | str]:
    """The positions and names of the arguments of a forward that are masks, by their names."""
    try:
        names = list(inspect.signature(own).parameters)[1:]
    except (TypeError, ValueError):
        return frozenset()
    masks = [(i, name) for i, name in enumerate(names) if "mask" in name]
    return frozenset(i for i, _ in masks) | frozenset(name for _, name in masks)


def drift(module: Any, name: str, dtype: torch.dtype) -> ModelError:
    """Returns the error for a parameter whose dtype was changed behind the policy's back."""
    policy = getattr(module, "_dtype_policy", None)
    return ModelError(
        f"Parameter {name!r} of {type(module).__name__}({module.extra_repr()}) has not the dtype of its policy",
        got={"dtype": dtypes.standardize(dtype)},
        expected=f"{dtypes.standardize(module._narrowcast_variable)}, the variable dtype of {policy!r}",
        fix="Call `.float()` on the module, which brings its parameters back to the policy's dtype",
    )
