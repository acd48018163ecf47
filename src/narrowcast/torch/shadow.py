"""Running a module's own forward on other parameters than its own, without touching the module.

The module's forward runs on a *shadow*: an object of the module's own class that shares everything with it, except
that its parameters are cast. The module is not changed while it runs, so threads, recursion and exceptions see it
whole; what the forward assigned to its attributes is copied back. Under `torch.compile` and `torch.export`, which trace
in one thread and do not follow such an object, the cast parameters are put into the module itself and taken out again.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.torch.carried import Cast, drift
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.inputs import cast_arguments, cast_floats

__all__ = ["CustomCast", "KnownCast", "Shadowed", "speaks_of_dtypes"]

_MISSING = object()
_DTYPE_WORDS = ("dtype", "type (", "scalar type")
_Tensors = dict[str, Any]


class Shadowed(Cast):
    """A module whose own forward runs with its parameters, and those of the children it owns, cast."""

    # Attributes that the forward derives from the parameters each time, and which are not copied back.
    _narrowcast_derived: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.RNNBase):
            cls._narrowcast_derived = ("_flat_weights", "_flat_weight_refs")

    def _narrowcast_call(
        self,
        via: torch.dtype,
        inner: torch.dtype,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        buffers: bool = False,
    ) -> Any:
        """Runs the module's own forward.

        Args:
            via: the dtype that parameters are rounded to.
            inner: the dtype that they then have in forward.
            args: the arguments, cast already.
            kwargs: the same by name.
            buffers: whether floating buffers are cast to `inner` too; what the forward writes into them is kept.
        """
        placed: dict[str, _Tensors] = {}
        parameters = self._narrowcast_cast_parameters(self, via, inner)
        if parameters is not None:
            placed["_parameters"] = parameters
        if buffers:
            cast = _cast_buffers(self, inner)
            if cast is not None:
                placed["_buffers"] = cast
        children: list[tuple[str, _Tensors]] = []
        for name in self._narrowcast_owned:
            parameters = self._narrowcast_cast_parameters(self._modules[name], via, inner)  # type: ignore[attr-defined]
            if parameters is not None:
                children.append((name, parameters))
        is_traced = torch.compiler.is_compiling()
        if not placed and not children and not (is_traced and self._narrowcast_derived):
            return self._narrowcast_base.forward(self, *args, **kwargs)
        run = _run_traced if is_traced else _run_shadow
        return run(self, placed, children, args, kwargs)

    def _narrowcast_cast_parameters(self, module: Any, via: torch.dtype, inner: torch.dtype) -> _Tensors | None:
        """The parameters of the module, or of a child it owns, cast; `None` where they are all as they have to be."""
        changed = False
        cast: _Tensors = {}
        variable, compute = self._narrowcast_variable, self._narrowcast_compute
        for name, tensor in module._parameters.items():
            cast[name] = tensor
            dtype = None if tensor is None else tensor.dtype
            if dtype is variable or dtype is compute:
                if dtype is not via:
                    cast[name] = tensor = tensor.to(via)
                    changed = True
                if inner is not via:
                    cast[name] = tensor.to(inner)
                    changed = True
            elif tensor is not None and tensor.is_floating_point():
                raise drift(self, name, tensor.dtype)
        if "parametrizations" in module._modules:
            # Registered after the policy: the value is computed by a property of the class above ours, which the shadow
            # does not have.
            for name in module._modules["parametrizations"]:
                narrow = getattr(module, name).to(via).to(inner)
                cast[name] = narrow
                changed = True
        return cast if changed else None


def speaks_of_dtypes(error: RuntimeError) -> bool:
    """Says whether an error of PyTorch is about operands of different dtypes."""
    return any(word in str(error) for word in _DTYPE_WORDS)


class CustomCast(Shadowed):
    """A module with a forward of its author: inputs and parameters in the compute dtype, outputs as they come."""

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        compute = self._narrowcast_compute
        args, kwargs = cast_arguments(args, kwargs, compute, self._narrowcast_masks)
        try:
            return self._narrowcast_call(compute, compute, args, kwargs)
        except RuntimeError as error:
            if not torch.compiler.is_compiling() and speaks_of_dtypes(error):
                error.add_note(
                    f"This happened inside {type(self).__name__}, whose own arithmetic runs in {compute} under "
                    f"{self._dtype_policy!r}. Children without a policy compute in the dtype of their parameters; and "
                    "where its forward reads the parameters of a child (`self.child.weight`) instead of calling it, "
                    "these are in the dtype in which they are stored. Give this module the rule 'keep', or let it cast."
                )
            raise


class KnownCast(Shadowed):
    """A layer of PyTorch whose parameters are multiplied: inputs, parameters and outputs in the compute dtype.

    Numerics:
        Where the CPU multiplies the compute dtype slowly, inputs and parameters are rounded to it, computed on in
        float32, and the outputs are rounded.
    """

    def _narrowcast_run(self, *args: Any, **kwargs: Any) -> Any:
        compute = self._narrowcast_compute
        args, kwargs = cast_arguments(args, kwargs, compute, self._narrowcast_masks)
        inner = torch.float32 if is_slow_for(self, compute) else compute
        if inner is not compute:
            args, kwargs = cast_arguments(args, kwargs, inner)
        return cast_floats(self._narrowcast_call(compute, inner, args, kwargs), compute)


def is_slow_for(module: Any, dtype: torch.dtype) -> bool:
    """Says whether the device of a module's first parameter multiplies `dtype` slower than float32."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return is_slow(parameter, dtype)
    return False


def _cast_buffers(module: Any, inner: torch.dtype) -> _Tensors | None:
    cast = {}
    changed = False
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dtype is not inner and buffer.is_floating_point():
            cast[name] = buffer.to(inner)
            changed = True
        else:
            cast[name] = buffer
    return cast if changed else None


def _run_shadow(
    module: Any,
    placed: dict[str, _Tensors],
    children: list[tuple[str, _Tensors]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    shadows: list[tuple[Any, Any, dict[str, Any], dict[str, _Tensors]]] = []
    if children:
        modules = dict(module._modules)
        for name, tensors in children:
            child = module._modules[name]
            shadows.append((child, *_shadow(child, type(child), {"_parameters": tensors})))
            modules[name] = shadows[-1][1]
        placed["_modules"] = modules
    base = module._narrowcast_base
    whole, before, before_inside = _shadow(module, base, placed)
    try:
        return base.forward(whole, *args, **kwargs)
    finally:
        _copy_back(module, whole, before, before_inside, module._narrowcast_derived)
        for shadow in shadows:
            _copy_back(*shadow)


def _shadow(module: Any, cls: Any, placed: dict[str, _Tensors]) -> tuple[Any, dict[str, Any], dict[str, _Tensors]]:
    """A module's shadow, and copies of its attributes and of what was placed in it, to tell what a forward changes."""
    # `dict.copy` and not `update`, and past the module's own __setattr__: this is done at every call.
    state = module.__dict__.copy()
    state.update(placed)
    shadow = object.__new__(cls)
    object.__setattr__(shadow, "__dict__", state)
    for name in _slots(cls):
        if hasattr(module, name):
            object.__setattr__(shadow, name, getattr(module, name))
    return shadow, state.copy(), {name: values.copy() for name, values in placed.items()}


def _copy_back(
    module: Any,
    shadow: Any,
    before: dict[str, Any],
    before_inside: dict[str, _Tensors],
    derived: tuple[str, ...] = (),
) -> None:
    """Takes over what a forward changed on the shadow, other than what it derives from the parameters."""
    _copy_back_entries(module.__dict__, before, shadow.__dict__, derived)
    for where, values in before_inside.items():
        _copy_back_entries(module.__dict__[where], values, before[where])
        if where == "_buffers" and module.training:
            _copy_back_values(module._buffers, values)
    cls: Any = type(shadow)
    for name in _slots(cls):
        if hasattr(shadow, name):
            object.__setattr__(module, name, getattr(shadow, name))


def _copy_back_entries(
    own: dict[str, Any], before: dict[str, Any], after: dict[str, Any], derived: tuple[str, ...] = ()
) -> None:
    """Takes over what a forward set or deleted on the shadow: attributes, parameters, buffers or children.

    Against what was there when the call began and not against the module, which another thread may have changed.
    """
    if all(map(operator.is_, before.values(), after.values())) and before.keys() == after.keys():
        return
    changed = {name: value for name, value in after.items() if before.get(name, _MISSING) is not value}
    own.update({name: value for name, value in changed.items() if name not in derived})
    for name in before.keys() - after.keys():
        own.pop(name, None)


def _copy_back_values(own: dict[str, Any], placed: dict[str, Any]) -> None:
    """Takes over what a forward wrote into the cast copies of buffers."""
    with torch.no_grad():
        for name, value in placed.items():
            buffer = own.get(name)
            if buffer is not None and value is not None and buffer.dtype is not value.dtype:
                buffer.copy_(value)


@lru_cache(maxsize=4096)
def _slots(cls: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in cls.__mro__:
        declared = base.__dict__.get("__slots__", ())
        for name in [declared] if isinstance(declared, str) else declared:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _run_traced(
    module: Any,
    placed: dict[str, _Tensors],
    children: list[tuple[str, _Tensors]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The same for tracing: the cast tensors stand in the module itself while its forward runs."""
    own_parameters, own_buffers = module._parameters, module._buffers
    own_of_children = [module._modules[name]._parameters for name, _ in children]
    derived = {name: module.__dict__[name] for name in module._narrowcast_derived}
    try:
        if "_parameters" in placed:
            module._parameters = placed["_parameters"]
        if "_buffers" in placed:
            module._buffers = placed["_buffers"]
        for name, tensors in children:
            module._modules[name]._parameters = tensors
        return module._narrowcast_base.forward(module, *args, **kwargs)
    finally:
        module._parameters = own_parameters
        module._buffers = own_buffers
        if derived:
            module.__dict__.update(derived)
        for (name, _), own in zip(children, own_of_children, strict=True):
            module._modules[name]._parameters = own
        if "_buffers" in placed and module.training:
            _copy_back_values(own_buffers, placed["_buffers"])
