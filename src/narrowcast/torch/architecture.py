"""The architecture of models made of layers, saved beside their tensors: a config, and the shapes they are built with.

A config is made into a model from classes that are known here; see `narrowcast.serialization`. Nothing is imported by a
name that stands in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from narrowcast.errors import CheckpointError, NarrowcastError
from narrowcast.serialization import deserialize, serialize, sharing
from narrowcast.torch import scheme
from narrowcast.torch.kinds import is_layer

__all__ = ["describe", "make", "make_ready"]


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Returns what a model is made again from, as plain JSON values; `None` where it holds no layer.

    Returns:
        `config`: of the whole model, if it is a layer that has one; `None` otherwise, with the `reason`. `built`: by
        path, the shapes that each layer was built with.
    """
    layers = _layers(model)
    if not layers:
        return None
    config, reason = None, f"the model is a {type(model).__name__}, whose code only its author has"
    if is_layer(model):
        try:
            with sharing():
                config, reason = serialize(model), ""
        except (NarrowcastError, NotImplementedError, TypeError) as error:
            reason = str(error)
    shapes = {path: layer.get_build_config() for path, layer in layers.items()}
    return {
        "config": config,
        "reason": reason,
        "built": {path: serialize(shape) for path, shape in shapes.items() if shape},
    }


def make(architecture: Mapping[str, Any] | None, custom_objects: Mapping[str, Any] | None) -> nn.Module:
    """Makes the model that `describe` described, without values and without policies, in eval mode.

    Args:
        architecture: what `describe` returned.
        custom_objects: classes and functions by name, where they are not registered.

    Raises:
        CheckpointError: the model was saved without a config, it is not valid, or making the model fails.
        ConfigError: a class is unknown, or its config does not fit it.
    """
    from narrowcast.torch.layers import carrying  # also makes the layers' classes known

    if architecture is None or architecture.get("config") is None:
        reason = "it holds no layers of narrowcast.layers" if architecture is None else architecture.get("reason")
        raise CheckpointError(
            f"Saved model says not how it is made: {reason}",
            fix="Make the model yourself and load into it: `load(model, folder)`",
        )
    with carrying.bare(), sharing():
        try:
            model = deserialize(architecture["config"], custom_objects)
            if not is_layer(model):
                raise CheckpointError("Saved model's config is not that of a layer", got={"type": type(model).__name__})
            _build(model, architecture)
        except NarrowcastError:
            raise
        except Exception as error:  # of PyTorch (no memory for such a shape), or of a class of somebody else
            raise CheckpointError(f"Saved model cannot be made from its config: {error}") from error
    model.eval()
    return model  # type: ignore[no-any-return]


def make_ready(model: nn.Module, architecture: Mapping[str, Any] | None) -> Callable[[], None]:
    """Builds the layers of a model that are not built, and takes the policies off them that they were made with.

    Returns:
        A function that puts the policies back, for the case that loading fails.
    """
    layers = _layers(model)
    if not layers:
        return lambda: None
    from narrowcast.torch.layers import carrying

    fresh = [layer for layer in layers.values() if not layer.built]
    with carrying.bare(values=True):
        _build(model, architecture or {})
    take_back = scheme.commit([change for layer in layers.values() for change in carrying.changes_back(layer)])

    def put_back() -> None:
        take_back()
        for layer in fresh:
            if layer.built:
                carrying.carry(layer)

    return put_back


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name.replace(".", "/"): module for name, module in model.named_modules() if is_layer(module)}


def _build(model: nn.Module, architecture: Mapping[str, Any]) -> None:
    built = architecture.get("built", {})
    if not isinstance(built, Mapping):
        raise CheckpointError("Saved model's shapes are not a table", got={"built": built})
    for path, shapes in built.items():
        # Layers appear as those above them are built, so each is looked for in its turn.
        try:
            layer: Any = model.get_submodule(path.replace("/", "."))
        except AttributeError:
            continue  # which the comparison of trees reports
        if is_layer(layer) and not layer.built:
            layer.build_from_config(shapes)
