"""`Sequential`: layers one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from torch import nn

from narrowcast.errors import LayerError
from narrowcast.serialization import builtin, deserialize, serialize
from narrowcast.torch.layers.base import Layer
from narrowcast.torch.layers.carrying import LayerTransparent
from narrowcast.torch.layers.configs import make
from narrowcast.torch.scheme import original_class

__all__ = ["Sequential"]


@builtin()
class Sequential(Layer):
    """Layers, or any modules, one after the other: each gets what the one before returned.

    Inputs are passed on as they come: each layer casts for itself. A mask goes through all layers by their
    `compute_mask`, and to those whose `call` takes one.

    Args:
        layers: the layers. Their paths are their numbers: `0`, `1`, ...
        trainable: see `Layer`.
        name: see `Layer`.
        kwargs: those of `Layer`. Layers without a `dtype` of their own take that of the model.

    Example:
        >>> import torch
        >>> from narrowcast.torch.layers import Dense
        >>> model = Sequential([Dense(8, "relu"), Dense(2, dtype="float32")], dtype="mixed_bfloat16")
        >>> model(torch.ones(1, 4)).dtype, [layer.path for layer in model.layers]
        (torch.float32, ['0', '1'])
    """

    _narrowcast_float_carrier = LayerTransparent
    _narrowcast_kind = "container"

    def __init__(
        self, layers: Iterable[nn.Module] | None = None, trainable: bool = True, name: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(trainable=trainable, name=name, **kwargs)
        self.supports_masking = True
        for layer in layers or ():
            self.add(layer)

    def add(self, layer: nn.Module) -> None:
        """Puts a layer at the end.

        Raises:
            LayerError: it is no module.
        """
        if not isinstance(layer, nn.Module):
            raise LayerError(
                "Layer of a Sequential is no module", got={"layer": layer}, expected="a layer or an nn.Module"
            )
        self.add_module(str(len(self._modules)), layer)

    def pop(self) -> nn.Module:
        """Takes the last layer off and returns it.

        Raises:
            LayerError: there is none.
        """
        if not self._modules:
            raise LayerError("Sequential has no layer to take off")
        last: Any = self._modules.pop(str(len(self._modules) - 1))
        return last  # type: ignore[no-any-return]

    @property
    def layers(self) -> list[Any]:
        """The layers, in order: a list of its own."""
        return list(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: int) -> Any:
        return self.layers[index]

    def build(self, input_shape: Any) -> None:
        """Builds each layer for the shape that the one before returns.

        Raises:
            LayerError: there are no layers.
        """
        if not self._modules:
            raise LayerError("Sequential has no layers to build", fix="Add some first")
        shape = input_shape
        for layer in self.layers:
            if not isinstance(layer, Layer):
                shape = None
            elif shape is not None:
                try:
                    layer.build(shape)
                    shape = layer.compute_output_shape(shape)
                except NotImplementedError:
                    shape = None
            if shape is None and any(isinstance(other, Layer) and not other.built for other in self.layers):
                self._call_on_zeros(input_shape)  # what comes out of a module shows when it runs
                return

    def _builds_by_call(self) -> bool:
        return True

    def call(self, inputs: Any, mask: Any = None, **kwargs: Any) -> Any:
        """Returns what the last layer returns.

        Args:
            inputs: what the first layer takes.
            mask: the mask of the inputs, for layers that take one.
            kwargs: passed on to the layers whose `call` has arguments of these names.
        """
        for layer in self._modules.values():
            if isinstance(layer, Layer):
                takes = _arguments(original_class(layer))
                further = {name: value for name, value in kwargs.items() if name in takes}
                if mask is not None and "mask" in takes:
                    further["mask"] = mask
                mask = layer.compute_mask(inputs, mask) if layer.supports_masking else None
                inputs = layer(inputs, **further)
            else:
                inputs = layer(inputs)  # type: ignore[misc]
                mask = None
        return inputs

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns the mask of the outputs, as far as it does not take running the layers to know."""
        return previous_mask

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `Layer`; every layer must be able to say."""
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise NotImplementedError(f"{type(layer).__name__} does not say what shape it returns")
            input_shape = layer.compute_output_shape(input_shape)
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """See `Layer`. The configs of the layers, with their own policies, stand in `layers`."""
        return {**super().get_config(), "layers": [serialize(layer) for layer in self.layers]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Makes the model whose `get_config` returned `config`, here or in Keras; `config` stays as it is."""
        fields = {name: value for name, value in config.items() if name not in ("build_input_shape", "layers")}
        layers = [deserialize(layer) for layer in config.get("layers", ())]
        layers = [layer for layer in layers if not isinstance(layer, InputLayer)]
        if not all(isinstance(layer, nn.Module) for layer in layers):
            raise LayerError("Config of a Sequential has something in it that is no layer", got={"layers": layers})
        made: Self = make(cls, {**fields, "layers": layers})
        if config.get("build_input_shape"):
            made.build_from_config({"input_shape": config["build_input_shape"]})
        return made


@builtin()
class InputLayer:
    """What Keras' models begin with: no layer, only the shape of the input, which the config says elsewhere too."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns one, whatever the config says."""
        return cls()


_ARGUMENTS: dict[type, frozenset[str]] = {}


def _arguments(cls: Any) -> frozenset[str]:
    found = _ARGUMENTS.get(cls)
    if found is None:
        found = _ARGUMENTS[cls] = frozenset(inspect.signature(cls.call).parameters)
    return found
