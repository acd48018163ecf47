"""`Layer`: a `torch.nn.Module` with a `dtype`, variables made when shapes are known, a path and a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import nn

from narrowcast import dtype_policies
from narrowcast.dtype_policies import DTypePolicy
from narrowcast.errors import LayerError
from narrowcast.plan.plan import Plan
from narrowcast.serialization import builtin
from narrowcast.torch.kinds import working_module
from narrowcast.torch.layers import configs, paths, regularizers
from narrowcast.torch.layers.building import Building, building
from narrowcast.torch.layers.calls import forward_of
from narrowcast.torch.layers.carrying import LayerCast
from narrowcast.torch.layers.penalties import Penalties
from narrowcast.torch.layers.policies import resolve
from narrowcast.torch.layers.variables import Variables

__all__ = ["Layer"]


@builtin()
class Layer(Building, Variables, Penalties):
    """The base of all layers, to be subclassed: `build` makes the variables, `call` computes.

    It is an ordinary module: optimizers, hooks, `state_dict`, copies and `torch.compile` work as they do with any, and
    layers and modules nest in both directions.

    Args:
        activity_regularizer: a penalty on the outputs, added to `losses` at each call.
        trainable: whether its variables get gradients.
        dtype: a policy, its name, a map, a config or a dtype. `None` takes that of the layer above, or the global
            policy where none above was given one. A map is looked up by the paths of layers relative to this one.
        autocast: whether `call` sees floating arguments and variables in the compute dtype.
        name: a label; that of the class where it is not given. It has no part in paths.

    Example:
        >>> import torch
        >>> class Scale(Layer):
        ...     def build(self, input_shape):
        ...         self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="gain")
        ...     def call(self, inputs):
        ...         return inputs * self.gain
        >>> layer = Scale(dtype="mixed_bfloat16")
        >>> layer(torch.ones(2, 3)).dtype, layer.gain.dtype
        (torch.bfloat16, torch.float32)
    """

    _narrowcast_layer: ClassVar[bool] = True
    _narrowcast_core: ClassVar[bool] = False  # whether a module called `core` computes
    _narrowcast_kind: ClassVar[str | None] = None  # the kind of site, where it is not to be seen from what it holds
    _narrowcast_float_carrier: ClassVar[type[Any]] = LayerCast

    autocast: bool
    supports_masking: bool
    _given_policy: DTypePolicy | None
    _global_policy: DTypePolicy
    _given_autocast: bool
    _given_name: str | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "call" in cls.__dict__ and "forward" not in cls.__dict__:
            is_ours = cls.__module__.startswith(__package__)
            has_core = cls._narrowcast_core
            cls.forward = forward_of(
                cls.__dict__["call"], reads_core=has_core and not is_ours, is_leaf=has_core and is_ours
            )
        if "build" in cls.__dict__:
            cls.build = building(cls.__dict__["build"])
        if "get_config" in cls.__dict__:
            cls.get_config = configs.framed(cls.__dict__["get_config"])  # type: ignore[method-assign, assignment]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Notes the arguments, from which a config is made where the class has no `get_config` of its own."""
        self = super().__new__(cls)
        if cls.get_config is Layer.get_config:
            self.__dict__["_arguments"] = args, kwargs
        return self

    def __init__(
        self,
        *,
        activity_regularizer: Any = None,
        trainable: bool = True,
        dtype: Any = None,
        autocast: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if name is not None and (not isinstance(name, str) or "/" in name):
            raise LayerError("Name of a layer is not usable", got={"name": name}, expected="text without a '/'")
        # Into the dict itself, past PyTorch's `__setattr__`, which takes most of the time of making a layer.
        self.__dict__.update(
            _given_policy=None if dtype is None else dtype_policies.get(dtype),
            _global_policy=dtype_policies.dtype_policy(),
            _given_autocast=bool(autocast),
            autocast=bool(autocast),
            _given_name=name,
            _trainable=bool(trainable),
            activity_regularizer=regularizers.get(activity_regularizer),
            supports_masking=False,
            built=False,
            _is_settled=False,
            _is_building=False,
            _build_shapes=None,
            _weights={},
            _pending_weights=[],
            _losses=[],
            _losses_call=0,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        paths.adopt(self)

    # What subclasses define

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the layer's outputs; defined by each class."""
        raise NotImplementedError(f"{type(self).__name__} has no `call` method, which computes its outputs")

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shape of the outputs for inputs of a shape."""
        raise NotImplementedError(f"{type(self).__name__} has no `compute_output_shape` method")

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns the mask of the outputs: that of the inputs, unless a class says otherwise."""
        return previous_mask

    # What the layer is called and where it stands

    @property
    def name(self) -> str:
        """The layer's label: the one it was given, else that of its class."""
        return self._given_name or configs.snake_case(configs.class_of(self).__name__)

    @property
    def path(self) -> str:
        """The attribute path from the root of the model, joined by `/`; `''` for the root.

        While a layer's `get_config` runs, the paths of layers below it begin there.
        """
        return paths.path_of(self)

    # Dtypes

    def _resolved_policy(self) -> DTypePolicy:
        return resolve(self)

    def _carried_policy(self) -> DTypePolicy | None:
        policy: DTypePolicy | None = working_module(self).__dict__.get("_dtype_policy")
        return policy

    @property
    def dtype_policy(self) -> Any:
        """The policy of this layer.

        Once the layer is built it is what the layer carries out. Before, it is what it was given, which may be a map,
        or what it takes from above.

        Setting it on a layer that is built converts its variables, or is refused where that cannot be done.
        """
        if self._given_policy is not None and not self._is_settled and not paths.in_frame():
            return self._given_policy
        return self._carried_policy() or self._resolved_policy()

    @dtype_policy.setter
    def dtype_policy(self, policy: Any) -> None:
        from narrowcast.torch.layers.converting import convert

        convert(self, dtype_policies.get(policy))

    @property
    def compute_dtype(self) -> str | None:
        """The dtype that the layer computes in and returns, by name."""
        return (self._carried_policy() or self._resolved_policy()).compute_dtype

    @property
    def variable_dtype(self) -> str | None:
        """The dtype that the layer stores its variables in, by name."""
        return (self._carried_policy() or self._resolved_policy()).variable_dtype

    @property
    def dtype(self) -> str | None:
        """The same as `variable_dtype`."""
        return self.variable_dtype

    @property
    def input_dtype(self) -> str | None:
        """The same as `compute_dtype`: the dtype that floating arguments are cast to."""
        return self.compute_dtype

    @property
    def quantization_mode(self) -> str | None:
        """The name of the quantization mode, or `None`."""
        return (self._carried_policy() or self._resolved_policy()).quantization_mode

    def _tied_modules(self) -> list[nn.Module]:
        """Modules beside the core that share a variable with it and carry the policy with it."""
        return []

    def quantize(self, mode: str, *, filters: Any = None) -> Plan:
        """Quantizes this layer and all below it that can carry a mode: all of them or, on an error, none.

        Args:
            mode: the mode with its numbers (`"int8"`, `"float8"`). Each layer starts from the policy it has.
            filters: which layers: a regular expression or several, which must match the whole path relative to this
                layer, or a function of a layer that says yes or no, also for the modules of PyTorch that it holds.
                `None` for all. What is shared or tied is chosen by any of its paths.

        Returns:
            The plan that was carried out: what was quantized, what was not, and why. `print` shows it.

        Raises:
            LayerError: a layer is not built, or is quantized in another mode; or a filter matches no path.
            UnsupportedError: nothing here can carry the mode.
            WeightError: a weight holds NaN or infinity.

        Example:
            >>> from narrowcast.torch.layers import Dense
            >>> layer = Dense(8)
            >>> layer.build((None, 8))
            >>> layer.quantize("int8")[""].status.value, layer.dtype_policy
            ('applied', <QuantizedDTypePolicy "int8_from_float32">)
        """
        from narrowcast.torch.layers.converting import quantize

        return quantize(self, mode, filters)

    # Layers below

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[Layer]:
        """Returns this layer and the layers below it, each once, also those that stand in other modules."""
        found: dict[int, Layer] = {id(self): self}
        pending = [*self._modules.values()][::-1]
        seen: set[int] = set()
        while pending:
            module = pending.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, Layer):
                found.setdefault(id(module), module)
                if not recursive:
                    continue
            pending += [*module._modules.values()][::-1]
        return [layer for layer in found.values() if include_self or layer is not self]

    # The config

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal layer, as values that `narrowcast.saving.serialize` writes.

        A subclass adds those of its own `__init__`. Where it does not, they are taken from the arguments that the layer
        was made with. `dtype` says the policies of this layer and of all below as they are now.
        """
        return configs.config_of(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Makes the layer whose `get_config` returned `config`, which stays as it is."""
        made: Self = configs.make(cls, config)
        return made

    def extra_repr(self) -> str:
        """Returns the policy for the module's `repr`."""
        return f"dtype={self.dtype_policy.name!r}"


Layer.get_config = configs.framed(Layer.get_config)  # type: ignore[method-assign, assignment]
Layer.forward = forward_of(Layer.call)
