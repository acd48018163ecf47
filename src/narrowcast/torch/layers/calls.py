"""What happens around a layer's `call`: inputs become tensors, the layer is built, and `training` finds its value."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast import arrays
from narrowcast.errors import LayerError
from narrowcast.torch.inputs import cast_arguments

__all__ = ["as_tensors", "call_on_zeros", "current_call", "forward_of", "is_on_zeros", "is_read_by"]


class _Calls(threading.local):
    """The calls that run in this thread.

    Attributes:
        number: of the outermost call, counted through the process; 0 outside of calls.
        training: what the nearest call above was told, `None` if none was.
        reader: the layer whose author's `call` runs and reads the variables of its core.
        on_zeros: whether the call is one on zeros, by which layers are built.
    """

    number = 0
    training: bool | None = None
    reader: Any = None
    on_zeros = False


class _Traced:
    """What the nearest call above was told of `training` while `torch.compile` traces; it traces one call at a time.

    It has no threads of its own, which the tracer could not follow.
    """

    training: bool | None = None


_calls = _Calls()
_traced = _Traced()
_numbers = itertools.count(1)
_TENSORS = frozenset({Tensor, nn.Parameter})


def current_call() -> int:
    """Returns the number of the outermost call that runs in this thread, 0 outside of calls."""
    return _calls.number


def is_on_zeros() -> bool:
    """Says whether the call that runs in this thread is one on zeros, by which layers are built."""
    return _calls.on_zeros


def call_on_zeros(call: Callable[[Any], Any], zeros: Any) -> None:
    """Calls `call` on zeros to have layers built."""
    former, _calls.on_zeros = _calls.on_zeros, True
    try:
        with torch.no_grad():
            call(zeros)
    finally:
        _calls.on_zeros = former


def is_read_by(layer: Any) -> bool:
    """Says whether the author's `call` of `layer` runs in this thread and reads the variables of its core."""
    return _calls.reader is layer


def forward_of(call: Callable[..., Any], *, reads_core: bool = False, is_leaf: bool = False) -> Callable[..., Any]:
    """Returns the `forward` of a class that defines `call`: the same arguments, and what the module docstring says.

    Args:
        call: the function in the class.
        reads_core: whether the class has a core and a `call` of an author who may read its variables (`self.kernel`)
            instead of calling it. Then arguments and variables come in the compute dtype.
        is_leaf: whether `call` calls no layers. Then a call with one tensor takes a shorter way.
    """
    names = list(inspect.signature(call).parameters)[1:]
    takes_training = "training" in names
    place = names.index("training") if takes_training else -1
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(call).parameters.values())

    @functools.wraps(call, assigned=("__module__", "__qualname__", "__doc__", "__annotations__"))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or type(args[0]) not in _TENSORS or kwargs:
            args, kwargs = as_tensors(args, kwargs)
        told = None
        told_by_place = -1 < place < len(args)
        if kwargs or takes_training:
            told = args[place] if told_by_place else kwargs.get("training")
            if told_by_place and told is None:
                kwargs |= dict(zip(names[place:], args[place:], strict=False))
                args, told_by_place = args[:place], False
            if not takes_training and not takes_any:
                kwargs.pop("training", None)
        if not self._is_settled:
            self._settle_for(args, kwargs)
            if told is not None and not told_by_place:
                kwargs["training"] = told
            # Its class may have changed to one that carries a policy.
            outputs = self.forward(*args, **kwargs)
            self._check_map()
            return outputs
        if torch.compiler.is_compiling():
            if told is None:
                if takes_training:
                    kwargs["training"] = self.training if _traced.training is None else _traced.training
                outputs = self.call(*args, **kwargs)
            else:
                outputs = _call_traced(self, bool(told), args, kwargs)
            if self.activity_regularizer is not None:
                self._penalize(outputs)
            return outputs
        former, outermost = _calls.training, _calls.number == 0
        if takes_training and told is None:
            kwargs["training"] = self.training if former is None else former
        if outermost:
            _calls.number = next(_numbers)
        if told is not None:
            _calls.training = bool(told)
        try:
            if reads_core:
                outputs = _read_core(self, args, kwargs)
            else:
                outputs = self.call(*args, **kwargs)
            if self.activity_regularizer is not None:
                self._penalize(outputs)
            return outputs
        except RuntimeError as error:
            if outermost:
                self._explain_dtypes(error)
            raise
        finally:
            _calls.training = former
            if outermost:
                _calls.number = 0

    # Code of its own: torch.compile counts recompilations by code object.
    forward.__code__ = forward.__code__.replace()  # type: ignore[attr-defined]
    if not is_leaf or takes_training:
        return forward

    # Short for torch.compile too, which checks at each call all that was read on the way.
    @functools.wraps(call, assigned=("__module__", "__qualname__", "__doc__", "__annotations__"))
    def short(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or len(args) != 1
            or not isinstance(args[0], Tensor)
            or not self._is_settled
            or self.activity_regularizer is not None
        ):
            return forward(self, *args, **kwargs)
        return self.call(args[0])

    short.__code__ = short.__code__.replace()  # type: ignore[attr-defined]
    return short


def _call_traced(layer: Any, told: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    former, _traced.training = _traced.training, told
    try:
        return layer.call(*args, **kwargs)
    finally:
        _traced.training = former


def _read_core(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    former, _calls.reader = _calls.reader, layer if layer.autocast else None
    try:
        if layer.autocast:
            args, kwargs = cast_arguments(args, kwargs, getattr(torch, layer.compute_dtype))
        return layer.call(*args, **kwargs)
    finally:
        _calls.reader = former


def as_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turns NumPy arrays, and a first argument that is a list of numbers, into tensors.

    Raises:
        LayerError: the first argument is a list that mixes tensors and plain numbers.

    Example:
        >>> as_tensors(([1, 2],), {})
        ((tensor([1, 2]),), {})
    """
    if args and isinstance(args[0], list) and args[0] and not _holds_arrays(args[0]):
        args = (_from_numbers(args[0]), *args[1:])
    if any(_holds_numpy(value) for value in (*args, *kwargs.values())):
        args = tuple(_convert(value) for value in args)
        kwargs = {name: _convert(value) for name, value in kwargs.items()}
    return args, kwargs


def _from_numbers(values: list[Any]) -> Any:
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return values


def _holds_arrays(values: Any) -> bool:
    if isinstance(values, list | tuple):
        found = [_holds_arrays(value) for value in values]
        if any(found) and any(isinstance(value, bool | int | float) for value in values):
            raise LayerError(
                "Argument of a layer mixes tensors and plain numbers",
                got={"types": [type(value).__name__ for value in values]},
                expected="a tensor, or a structure of tensors",
                fix="Make the numbers a tensor",
            )
        return any(found)
    if isinstance(values, dict):
        return any(_holds_arrays(value) for value in values.values())
    return arrays.framework(values) is not None


def _holds_numpy(value: Any) -> bool:
    if type(value) in _TENSORS or value is None:
        return False
    if isinstance(value, list | tuple):
        return any(_holds_numpy(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_numpy(item) for item in value.values())
    return arrays.framework(value) == "numpy"


def _convert(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make([_convert(item) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([_convert(item) for item in value])
    if isinstance(value, dict):
        return type(value)((key, _convert(item)) for key, item in value.items())
    if arrays.framework(value) != "numpy":
        return value
    if arrays.dtype_name(value) == "bfloat16":  # which NumPy has from ml_dtypes, and PyTorch does not take from there
        return torch.tensor(value.view("int16")).view(torch.bfloat16)
    return torch.tensor(value)
