"""The variables of a layer: made, tracked, listed in Keras' order, read and set in Keras' layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.errors import LayerError
from narrowcast.torch.layers import weights
from narrowcast.torch.layers.calls import is_read_by
from narrowcast.torch.layers.carrying import is_empty
from narrowcast.torch.layers.configs import refuse

__all__ = ["CoreVariable", "Variables"]

Layout = Callable[[Any, Tensor], Tensor]


def _same(layer: Any, value: Tensor) -> Tensor:
    return value


class CoreVariable:
    """A variable of a layer that stands in its core, seen in Keras' layout.

    Reading gives the values as they are stored (of a quantized layer, those that its codes stand for), in the compute
    dtype where the layer's own `call` reads them. Setting writes the values.

    Args:
        name: the parameter, or buffer, of the core.
        to_keras: from the layer and the core's tensor, the tensor in Keras' layout.
        from_keras: the way back.
    """

    def __init__(self, name: str, to_keras: Layout = _same, from_keras: Layout = _same) -> None:
        self._core_name = name
        self._to_keras = to_keras
        self._from_keras = from_keras

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        core = layer._modules.get("core")
        if core is None:
            raise AttributeError(f"{type(layer).__name__} is not built, so it has no {self._name!r} yet")
        value = getattr(core, self._core_name, None)
        if value is None:
            return None
        value = self._to_keras(layer, value)
        if is_read_by(layer) and value.is_floating_point():
            value = value.to(getattr(torch, layer.compute_dtype))
        return value

    def __set__(self, layer: Any, value: Any) -> None:
        core = layer._modules.get("core")
        if core is None:
            raise LayerError(
                f"{type(layer).__name__} is not built, so its {self._name!r} cannot be set", fix="Build it first"
            )
        stored = core._parameters.get(self._core_name, core._buffers.get(self._core_name))
        if stored is None:
            what = f"is quantized ({layer.quantization_mode})" if layer.quantization_mode else f"has no {self._name}"
            raise LayerError(
                f"Variable {self._name!r} of {type(layer).__name__} at {layer.path!r} cannot be set: the layer {what}",
                fix="Set the values first and quantize then" if layer.quantization_mode else "",
            )
        given = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        present = self._to_keras(layer, stored)
        if given.shape != present.shape:
            raise LayerError(
                f"Value for {self._name!r} of {type(layer).__name__} at {layer.path!r} has another shape",
                got={"shape": tuple(given.shape)},
                expected=str(tuple(present.shape)),
            )
        with torch.no_grad():
            stored.copy_(self._from_keras(layer, given.to(stored.device)).reshape(stored.shape))


class Variables(nn.Module):
    """What a layer has to do with variables; a part of `Layer`."""

    variable_names: ClassVar[tuple[str, ...]] = ()
    """The variables of a layer with a core, in Keras' order; each is a property of the layer, in Keras' layout."""

    _variables_below: ClassVar[dict[str, tuple[str, str]]] = {}
    """Variables that are the layer's own in Keras, and a child's here: by name, the child and the name there."""

    path: Any
    built: bool
    _is_settled: bool
    _trainable: bool
    _weights: dict[str, weights.Weight]
    _pending_weights: list[tuple[nn.Parameter, weights.Weight]]
    _flatten_layers: Any
    _resolved_policy: Any

    def add_weight(
        self,
        shape: Any = None,
        initializer: Any = None,
        dtype: Any = None,
        *,
        trainable: bool = True,
        autocast: bool = True,
        regularizer: Any = None,
        constraint: Any = None,
        name: str | None = None,
    ) -> nn.Parameter:
        """Makes a variable. Assign it to an attribute: that is its name in `state_dict`.

        Args:
            shape: whole numbers; `()` for a scalar.
            initializer: a name, a config or a function of shape and dtype; `glorot_uniform` for floats, else zeros.
            dtype: the dtype it is stored in, whatever the policy; the variable dtype of the policy by default.
            trainable: whether it gets gradients.
            autocast: whether `call` sees it in the compute dtype.
            regularizer: a penalty, added to `losses`.
            constraint: not supported; see `torch.nn.utils.parametrize`.
            name: a label, and its attribute where it is assigned to none.

        Raises:
            LayerError: the shape is not known, or the layer is built already.
        """
        refuse("constraint", constraint)
        if isinstance(shape, str):
            raise LayerError("Shape of a variable is not a shape", got={"shape": shape}, fix="Give its name as `name=`")
        if self._is_settled:
            raise LayerError(
                f"{type(self).__name__} at {self.path!r} is built already, so it makes no more variables",
                fix="Make them in `__init__` or `build`",
            )
        parameter, weight = weights.make(
            shape=shape,
            initializer=initializer,
            dtype=dtype,
            variable_dtype=self._resolved_policy().variable_dtype,
            trainable=trainable,
            autocast=autocast,
            regularizer=regularizer,
            name=name,
            empty=is_empty(),
        )
        self._pending_weights.append((parameter, weight))
        return parameter

    def __setattr__(self, name: str, value: Any) -> None:
        """Registers lists and dicts of modules or variables as the modules that PyTorch has for them."""
        if name in self.variable_names:
            object.__setattr__(self, name, value)
            return
        if type(value) in (list, tuple, dict) and value and name not in _OWN and "_modules" in self.__dict__:
            value = _tracked(value)
        super().__setattr__(name, value)
        pending = self.__dict__.get("_pending_weights")
        if pending and isinstance(value, nn.Parameter | nn.ParameterList | nn.ParameterDict):
            held = [("", value)] if isinstance(value, nn.Parameter) else list(value.named_parameters())
            for suffix, parameter in held:
                for entry in pending:
                    if entry[0] is parameter:
                        pending.remove(entry)
                        self._weights[f"{name}.{suffix}" if suffix else name] = entry[1]
                        break

    def __getattr__(self, name: str) -> Any:
        if name in type(self).variable_names:
            raise AttributeError(
                f"{type(self).__name__} is not built, so it has no {name!r} yet. Build it, or call it."
            )
        return super().__getattr__(name)

    @property
    def trainable(self) -> bool:
        """Whether the variables get gradients; setting it sets it for all layers below too."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        layers = self._flatten_layers()
        fixed = {id(p) for layer in layers for name, p, w in weights.named(layer) if not w.trainable}
        for layer in layers:
            layer._trainable = bool(value)
        for parameter in self.parameters():
            if parameter.is_floating_point() and id(parameter) not in fixed:
                parameter.requires_grad_(bool(value))

    def _own_variables(self) -> Iterator[tuple[str, Any]]:
        """The layer's own variables by name, in Keras' order and layout: those that are not trainable last."""
        if self.variable_names:
            yield from ((name, getattr(self, name)) for name in self.variable_names if self.built)
            return
        made = list(weights.named(self))
        yield from ((name, parameter) for name, parameter, weight in made if weight.trainable)
        yield from ((name, parameter) for name, parameter, weight in made if not weight.trainable)

    @property
    def weights(self) -> list[Any]:
        """The variables of this layer and of all below, in Keras' order and layout."""
        return [value for _, _, value in self._targets()]

    def _targets(self) -> list[tuple[Any, str, Any]]:
        """Every variable with its layer and name; one that two layers list, once."""
        found: dict[int, tuple[Any, str, Any]] = {}
        for layer in self._flatten_layers():
            for name, value in layer._own_variables():
                if value is not None:
                    found.setdefault(id(value), (layer, name, value))
        return list(found.values())

    @property
    def trainable_weights(self) -> list[Any]:
        """Those of `weights` that get gradients."""
        return [value for value in self.weights if value.requires_grad]

    @property
    def non_trainable_weights(self) -> list[Any]:
        """Those of `weights` that get none."""
        return [value for value in self.weights if not value.requires_grad]

    @property
    def variables(self) -> list[Any]:
        """The same as `weights`."""
        return self.weights

    @property
    def trainable_variables(self) -> list[Any]:
        """The same as `trainable_weights`."""
        return self.trainable_weights

    @property
    def non_trainable_variables(self) -> list[Any]:
        """The same as `non_trainable_weights`."""
        return self.non_trainable_weights

    def get_weights(self) -> list[Any]:
        """Returns the values of `weights` as NumPy arrays; bfloat16, which NumPy has not, as float32."""
        values = [value.detach().cpu() for value in self.weights]
        return [np.asarray(value.float() if value.dtype is torch.bfloat16 else value) for value in values]

    def set_weights(self, values: Any) -> None:
        """Sets the variables of this layer and of all below from arrays in Keras' order and layout.

        Raises:
            LayerError: there are more or fewer arrays than variables, or one has another shape. Nothing is changed.
        """
        targets = self._targets()
        values = list(values)
        if len(values) != len(targets):
            raise LayerError(
                f"{type(self).__name__} at {self.path!r} has another number of variables",
                got={"arrays": len(values)},
                expected=f"{len(targets)}: {', '.join(name for _, name, _ in targets) or 'it is not built'}",
            )
        for (layer, name, present), value in zip(targets, values, strict=True):
            if tuple(value.shape) != tuple(present.shape):
                raise LayerError(
                    f"Value for {name!r} of {type(layer).__name__} at {layer.path!r} has another shape",
                    got={"shape": tuple(value.shape)},
                    expected=str(tuple(present.shape)),
                )
        for (layer, name, present), value in zip(targets, values, strict=True):
            if name in layer.variable_names:
                setattr(layer, name, value)
            else:
                with torch.no_grad():
                    present.copy_(value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value)))

    def count_params(self) -> int:
        """Returns how many numbers the variables hold.

        Raises:
            LayerError: the layer is not built.
        """
        if not self.built:
            raise LayerError(
                f"{type(self).__name__} at {self.path!r} is not built, so it has no variables to count",
                fix="Build it: `build(shape)`, or one call",
            )
        return sum(int(value.numel()) for value in self.weights)


_OWN = frozenset({"_parameters", "_buffers", "_modules"})  # PyTorch's own, which it sets while it traces


def _tracked(value: Any) -> Any:
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return value
    items = list(value.values()) if isinstance(value, dict) else list(value)
    if all(isinstance(item, nn.Parameter) for item in items):
        return nn.ParameterDict(value) if isinstance(value, dict) else nn.ParameterList(items)
    if all(isinstance(item, nn.Module) for item in items):
        return nn.ModuleDict(value) if isinstance(value, dict) else nn.ModuleList(items)
    return value
