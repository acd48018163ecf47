"""When a layer's variables are made, and what happens then: shapes, the layer's `build`, its policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from narrowcast.torch.layers import shapes, weights
from narrowcast.torch.layers.calls import call_on_zeros
from narrowcast.torch.layers.carrying import carry, is_bare
from narrowcast.torch.layers.checking import check_map, note_plain_modules

__all__ = ["Building", "building"]


class Building(nn.Module):
    """What a layer has to do with being built; a part of `Layer`."""

    path: Any
    call: Any
    built: bool = False
    _trainable: bool
    _is_settled: bool
    _is_building: bool
    _build_shapes: dict[str, Any] | None
    _weights: dict[str, weights.Weight]
    _pending_weights: list[Any]
    _flatten_layers: Any
    _resolved_policy: Any

    build: Callable[..., None]
    """Makes the variables for inputs of a shape; see `_build_below`. Each class that has variables has its own."""

    def _build_below(self, input_shape: Any = None) -> None:
        """Makes the variables for inputs of a shape.

        Here, where a class defines no `build` of its own: builds the layers below by calling them on zeros.

        Args:
            input_shape: the shape of the first argument of `call`, `None` for axes of any length. Classes may take
                one shape for each of several arguments, named `<argument>_shape`.
        """
        below = self._flatten_layers(include_self=False)
        if input_shape is not None and not all(layer.built for layer in below):
            self._call_on_zeros(input_shape)

    def _builds_by_call(self) -> bool:
        """Whether the layer makes no variables itself: those below are built when `call` reaches them."""
        return getattr(type(self).build, "__wrapped__", None) is Building._build_below

    def _settle_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Builds the layer for the arguments of its first call, and has its policy carried out."""
        if torch.compiler.is_compiling():
            # One of Python's own, which the tracer can show.
            raise RuntimeError("Layer is not built. Build it before compiling: `build(shape)`, or one call.")
        if not self.built:
            given = shapes.shapes_of_call(self.build, self.call, args, kwargs)
            if self._builds_by_call():
                self._build_shapes = {name: shape for name, shape in given.items() if shape is not None} or None
            else:
                found = shapes.first_tensor(args, kwargs)
                with torch.device(torch.get_default_device() if found is None else found.device):
                    self.build(**given)
        self._settle()

    def _settle(self) -> None:
        """Has the policy carried out, now that the variables that `__init__` and `build` make are there."""
        if self._is_settled:
            return
        weights.register(self)
        weights.note_own_dtypes(self)
        variable_dtype = self._resolved_policy().variable_dtype
        if self._weights and variable_dtype is not None:
            weights.refresh(self, variable_dtype)
        self.built = True
        carry(self)  # type: ignore[arg-type]
        if not self._trainable:
            self.trainable = False
        self._is_settled = True

    def _check_map(self) -> None:
        """Raises where the map that the layer was given has rules for nothing; see `checking`."""
        check_map(self)  # type: ignore[arg-type]

    def _explain_dtypes(self, error: RuntimeError) -> None:
        """Notes on an error of dtypes what may have led to it; see `checking`."""
        note_plain_modules(self, error)  # type: ignore[arg-type]

    def _call_on_zeros(self, shape: Any) -> None:
        was_training = [module for module in self.modules() if module.training]
        try:
            self.eval()
            call_on_zeros(self.call, shapes.zeros_of(shape))
        finally:
            for module in was_training:
                module.training = True

    def _check_build_again(self, given: Mapping[str, Any]) -> None:
        """Raises where a layer that is built is to be built for other shapes; a class says which matter."""

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns the shapes the layer was built with, from which `build_from_config` builds an equal one."""
        if self._build_shapes is None:
            return None
        if len(self._build_shapes) == 1:
            return {"input_shape": next(iter(self._build_shapes.values()))}
        return {"shapes_dict": dict(self._build_shapes)}

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Builds the layer with the shapes that `get_build_config` returned."""
        if is_bare() and self._builds_by_call():
            # What will be loaded says of each layer below what it was built with.
            given = config.get("shapes_dict") or {"input_shape": config.get("input_shape")}
            self._build_shapes = {name: shapes.standardize(shape) for name, shape in given.items()}
            self._settle()
            return
        if config.get("shapes_dict"):
            self.build(**{name: shapes.standardize(shape) for name, shape in config["shapes_dict"].items()})
        elif config.get("input_shape") is not None:
            self.build(shapes.standardize(config["input_shape"]))


def building(build: Callable[..., None]) -> Callable[..., None]:
    """Returns a class's `build`, run once: with shapes in one form, and the policy carried out afterwards."""
    names = list(inspect.signature(build).parameters)[1:]

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_building:  # `super().build(...)` within a build
            build(self, *args, **kwargs)
            return
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names):
            build(self, *args, **kwargs)  # Python's own words for too many arguments
        given = {name: shapes.standardize(shape) for name, shape in given.items()}
        if self.built:
            self._check_build_again(given)
            self._settle()
            return
        self._is_building = True
        try:
            build(self, **given)
        finally:
            self._is_building = False
        self._build_shapes = {name: shape for name, shape in given.items() if shape is not None} or None
        self._settle()
        self._check_map()

    built.__name__, built.__doc__, built.__wrapped__ = "build", build.__doc__, build  # type: ignore[attr-defined]
    return built


Building.build = building(Building._build_below)
