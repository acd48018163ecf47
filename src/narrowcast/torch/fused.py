"""PyTorch's fast paths that go around child modules, and how they are turned off where a child carries a policy.

In eval mode without gradients some containers of PyTorch hand the weights of their children to one fused operator: the
children's `forward` never runs, and with it neither a policy nor a quantized kernel. Each such container asks an
attribute of its own first. A carrying class answers that attribute with the value that means no; the module keeps its
own value, so taking the class away turns the fast path on again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from narrowcast.torch.scheme import Carried, Change, carrying_class, original_class

__all__ = ["FAST_PATHS", "FastPathOff", "changes_for", "turn_off"]

FAST_PATHS: dict[type[nn.Module], dict[str, Any]] = {
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    # It packs padded input into a nested tensor, which only the layers' fast path can read.
    nn.TransformerEncoder: {"use_nested_tensor": False},
}
"""Containers with a fast path over their children's weights: the attribute that decides, and its value for no.

`nn.MultiheadAttention` has one too, over its own `out_proj`; it is one site, so the path sees cast weights.
"""


def turn_off(cls: type, base: type[nn.Module]) -> None:
    """Turns the fast paths of `base` off in `cls`, a carrying class that is being made for it."""
    for known, attributes in FAST_PATHS.items():
        if issubclass(base, known):
            for name, value in attributes.items():
                setattr(cls, name, _answering(name, value))


def _answering(name: str, value: Any) -> property:
    def get(self: Any) -> Any:
        return value

    def put(self: Any, own: Any) -> None:
        self.__dict__[name] = own

    return property(get, put, doc=f"Always {value!r} while the module, or one below it, carries a policy.")


class FastPathOff(Carried):
    """Carries no policy: only turns the fast path of a container off."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        base = cls.__dict__.get("_narrowcast_base")
        if base is None:
            super().__init_subclass__(**kwargs)
        else:
            turn_off(cls, base)


def changes_for(root: nn.Module, carried: Collection[nn.Module], changes: Iterable[Change] = ()) -> list[Change]:
    """Builds what turns fast paths off above modules that will carry something, and on again where none does.

    Args:
        root: the model.
        carried: the modules that carry a policy, a quantized form or an input cast once `changes` are in place.
        changes: the changes that will be committed with these. One of them whose module needs its fast path turned
            off is altered in place, since a module takes one change.

    Returns:
        Further changes, for modules that have none among `changes`.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2)
        >>> [change.module is layer for change in changes_for(layer, {layer.linear1})]
        [True]
    """
    given = {id(change.module): change for change in changes}
    further = []
    for module in root.modules():
        if not issubclass(original_class(module), tuple(FAST_PATHS)):
            continue
        change = given.get(id(module)) or Change.of(module)
        present = change.new_class
        is_needed = any(below in carried for below in module.modules() if below is not module)
        if not issubclass(present, Carried) and is_needed:
            change.new_class = carrying_class(FastPathOff, present)
        elif issubclass(present, Carried) and present._narrowcast_mixin is FastPathOff and not is_needed:
            change.new_class = present._narrowcast_base
        if change.new_class is not present and id(module) not in given:
            further.append(change)
    return further
