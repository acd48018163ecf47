"""Which of a site's tensors its policy rounds, to what, and which elements share a scale: one entry a mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from narrowcast.dtype_policies import DTypePolicy, registry
from narrowcast.numerics import float8
from narrowcast.observe.statistics import Groups, Narrow
from narrowcast.torch import float8_state
from narrowcast.torch.carried import Cast

__all__ = ["Forms", "forms_of", "register"]


@dataclass(frozen=True, slots=True)
class Forms:
    """How a site's tensors are rounded; `None` where one is not.

    Args:
        input: what flows in.
        weight: the weight, on its way into the computation.
        gradient: the gradient with respect to what flows out.
        stored_weight: the dtype that the weight is stored in where it is rounded for good: what was lost is not known
            any more, and it does not change.
    """

    input: Narrow | None = None
    weight: Narrow | None = None
    gradient: Narrow | None = None
    stored_weight: str | None = None


Reader = Callable[[Any, str, DTypePolicy], Forms]
"""From a module, its kind and its policy to its forms. Asked at every recorded step, because scales move."""

_READERS: dict[str, Reader] = {}
_WIDE_KINDS = ("norm", "softmax", "loss")


def register(modes: tuple[str, ...], reader: Reader) -> None:
    """Registers how the forms of `modes` are read."""
    for mode in modes:
        _READERS[mode] = reader


def forms_of(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    """Returns how the tensors of a module that carries `policy` are rounded."""
    reader = _READERS.get(registry.mode_of(policy).name)
    return reader(module, kind, policy) if reader is not None else Forms()


def _float(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    # Norms, softmax and losses take their input and their weight as they come and compute in float32.
    # A container that only calls its children casts nothing itself.
    if kind in _WIDE_KINDS or policy.compute_dtype is None or not isinstance(module, Cast):
        return Forms()
    narrow = Narrow(policy.compute_dtype)
    return Forms(input=narrow, weight=narrow)


def _int8(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return Forms(input=Narrow("int8", Groups.ROW), stored_weight="int8")


def _int8_weight(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return Forms(stored_weight="int8")


def _delayed(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return _scaled(Groups.TENSOR, Groups.TENSOR, getattr(module, float8_state.SCALE, None))


def _current(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return _scaled(Groups.TENSOR, Groups.TENSOR)


def _rowwise(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return _scaled(Groups.ROW, Groups.ROW)


def _block(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return _scaled(Groups.BLOCK, Groups.SQUARE)


def _scaled(groups: Groups, of_weight: Groups, scales: Any = None) -> Forms:
    """float8 as the first product of a layer has it; a layer with several (attention) has its input's from there."""
    of = {
        name: None if scales is None else scales[role : role + 1] for role, (name, _) in enumerate(float8_state.ROLES)
    }
    return Forms(
        input=Narrow(float8.FORWARD, groups, of["input"]),
        weight=Narrow(float8.FORWARD, of_weight, of["weight"]),
        gradient=Narrow(float8.GRADIENT, groups, of["gradient"]),
    )


def _static(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    scale = getattr(module, "float8_input_scale", None)
    return Forms(input=Narrow(float8.FORWARD, Groups.TENSOR, scale), stored_weight=float8.FORWARD)


def _dynamic(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return Forms(input=Narrow(float8.FORWARD, Groups.ROW), stored_weight=float8.FORWARD)


def _weight(module: Any, kind: str, policy: DTypePolicy) -> Forms:
    return Forms(stored_weight=float8.FORWARD)


register(("float",), _float)
register(("float8",), _delayed)
register(("float8/current",), _current)
register(("float8/rowwise",), _rowwise)
register(("float8/block",), _block)
register(("float8/static",), _static)
register(("float8/dynamic",), _dynamic)
register(("float8/weight",), _weight)
register(("int8",), _int8)
register(("int8/weight",), _int8_weight)
