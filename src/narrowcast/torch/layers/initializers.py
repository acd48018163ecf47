"""Initial values of variables, by name and by seed, as Keras names them.

An initializer is a value with a seed: called twice it gives the same numbers. They are drawn on the CPU in float32
(float64 for float64), so they are the same on every device and, but for rounding, in every dtype.

References:
    Glorot, Bengio, Understanding the difficulty of training deep feedforward neural networks, 2010.
    He et al., Delving Deep into Rectifiers, 2015. LeCun et al., Efficient BackProp, 1998.
    Saxe et al., Exact solutions to the nonlinear dynamics of learning in deep linear neural networks, 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from narrowcast.dtype_policies import dtypes
from narrowcast.errors import LayerError, closest
from narrowcast.serialization import builtin, deserialize

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "LecunNormal",
    "LecunUniform",
    "Ones",
    "Orthogonal",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "VarianceScaling",
    "Zeros",
    "get",
]

Shape = Sequence[int]
Class = TypeVar("Class", bound=type)

_CLASSES: dict[str, Any] = {}


def _named(*names: str) -> Callable[[Class], Class]:
    def register(cls: Class) -> Class:
        _CLASSES.update(dict.fromkeys((cls.__name__, *names), cls))
        return builtin(*names)(cls)

    return register


_STDDEV_OF_TRUNCATED = 0.87962566103423978
"""The standard deviation of a unit normal distribution that is cut off at two."""


class Initializer:
    """The base of initializers: called with a shape and a dtype, it returns a tensor."""

    def __call__(self, shape: Shape, dtype: Any = None) -> Tensor:
        """Returns the initial values, on torch's default device."""
        raise NotImplementedError(f"{type(self).__name__} does not say which values it gives")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal initializer."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes the initializer whose `get_config` returned `config`."""
        return cls(**config)

    def clone(self) -> Self:
        """Returns another initializer of the same settings; without a seed it draws other numbers."""
        return self.from_config(self.get_config())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({settings})"


def _torch_dtype(dtype: Any) -> torch.dtype:
    if dtype is None:
        return torch.float32
    found: torch.dtype = getattr(torch, dtypes.standardize(dtype))
    return found


@_named("zeros")
class Zeros(Initializer):
    """All zeros."""

    def __call__(self, shape: Shape, dtype: Any = None) -> Tensor:
        """See `Initializer`."""
        return torch.zeros(tuple(shape), dtype=_torch_dtype(dtype))


@_named("ones")
class Ones(Initializer):
    """All ones."""

    def __call__(self, shape: Shape, dtype: Any = None) -> Tensor:
        """See `Initializer`."""
        return torch.ones(tuple(shape), dtype=_torch_dtype(dtype))


@_named("constant")
class Constant(Initializer):
    """One value everywhere.

    Args:
        value: a number.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self, shape: Shape, dtype: Any = None) -> Tensor:
        """See `Initializer`."""
        return torch.full(tuple(shape), self.value, dtype=_torch_dtype(dtype))

    def get_config(self) -> dict[str, Any]:
        """See `Initializer`."""
        return {"value": self.value}


class _Random(Initializer):
    """The base of initializers that draw numbers.

    Args:
        seed: any integer; `None` draws one from torch's generator at the first call, so `torch.manual_seed` decides.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and type(seed) is not int:
            raise LayerError("Seed is not usable", got={"seed": seed}, expected="an integer, or None")
        self._config_seed = seed
        self.seed = seed

    def __call__(self, shape: Shape, dtype: Any = None) -> Tensor:
        """See `Initializer`."""
        wanted = _torch_dtype(dtype)
        device = torch.get_default_device()
        if device.type == "meta":
            return torch.empty(tuple(shape), dtype=wanted)
        if self.seed is None:
            self.seed = int(torch.randint(2**31, (), device="cpu"))
        generator = torch.Generator("cpu").manual_seed(self.seed)
        wide = torch.float64 if wanted is torch.float64 else torch.float32
        values = torch.empty(tuple(shape), dtype=wide, device="cpu")
        with torch.no_grad():
            self._draw(values, generator)
        return values.to(device=device, dtype=wanted)

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """See `Initializer`."""
        return {"seed": self._config_seed}


@_named("random_normal", "normal")
class RandomNormal(_Random):
    """A normal distribution.

    Args:
        mean: its mean.
        stddev: its standard deviation.
        seed: see the base class.
    """

    def __init__(self, mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> None:
        super().__init__(seed)
        self.mean, self.stddev = mean, stddev

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        values.normal_(self.mean, self.stddev, generator=generator)

    def get_config(self) -> dict[str, Any]:
        """See `Initializer`."""
        return {"mean": self.mean, "stddev": self.stddev, **super().get_config()}


@_named("truncated_normal")
class TruncatedNormal(RandomNormal):
    """A normal distribution, cut off at two standard deviations from its mean."""

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        _truncated(values, self.mean, self.stddev, generator)


def _truncated(values: Tensor, mean: float, stddev: float, generator: torch.Generator) -> None:
    if stddev > 0:
        low, high = mean - 2 * stddev, mean + 2 * stddev
        torch.nn.init.trunc_normal_(values, mean, stddev, low, high, generator=generator)
    else:
        values.fill_(mean)


@_named("random_uniform", "uniform")
class RandomUniform(_Random):
    """An even distribution.

    Args:
        minval: the least value.
        maxval: the bound above.
        seed: see the base class.
    """

    def __init__(self, minval: float = -0.05, maxval: float = 0.05, seed: int | None = None) -> None:
        super().__init__(seed)
        self.minval, self.maxval = minval, maxval

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        values.uniform_(self.minval, self.maxval, generator=generator)

    def get_config(self) -> dict[str, Any]:
        """See `Initializer`."""
        return {"minval": self.minval, "maxval": self.maxval, **super().get_config()}


@_named("variance_scaling")
class VarianceScaling(_Random):
    """Values whose variance is `scale / n`, so that activations keep their size through a layer.

    Args:
        scale: a positive number.
        mode: what n is: `fan_in` (inputs that are summed for an output), `fan_out`, or `fan_avg`, their mean.
        distribution: `truncated_normal` (also called `normal`), `untruncated_normal` or `uniform`.
        seed: see the base class.
        input_axes: the axes of the kernel that count as inputs; with `output_axes`, in place of the rule for kernels:
            inputs in the last axis but one, outputs in the last, and the window of a convolution before them.
        output_axes: the axes that count as outputs.
    """

    def __init__(
        self,
        scale: float = 1.0,
        mode: str = "fan_in",
        distribution: str = "truncated_normal",
        seed: int | None = None,
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(seed)
        if not scale > 0:
            raise LayerError(
                "Scale of an initializer is not positive", got={"scale": scale}, expected="a number above 0"
            )
        distribution = {"normal": "truncated_normal"}.get(distribution, distribution)
        _one_of("mode", mode, ("fan_in", "fan_out", "fan_avg"))
        _one_of("distribution", distribution, ("truncated_normal", "untruncated_normal", "uniform"))
        self.scale, self.mode, self.distribution = scale, mode, distribution
        self.input_axes, self.output_axes = input_axes, output_axes

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        fan_in, fan_out = _fans(values.shape, self.input_axes, self.output_axes)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        variance = self.scale / max(1.0, fan)
        if self.distribution == "uniform":
            values.uniform_(-math.sqrt(3 * variance), math.sqrt(3 * variance), generator=generator)
        elif self.distribution == "untruncated_normal":
            values.normal_(0.0, math.sqrt(variance), generator=generator)
        else:
            _truncated(values, 0.0, math.sqrt(variance) / _STDDEV_OF_TRUNCATED, generator)

    def get_config(self) -> dict[str, Any]:
        """See `Initializer`."""
        return {
            "scale": self.scale,
            "mode": self.mode,
            "distribution": self.distribution,
            "input_axes": self.input_axes,
            "output_axes": self.output_axes,
            **super().get_config(),
        }

    def with_axes(self, input_axes: Sequence[int], output_axes: Sequence[int]) -> VarianceScaling:
        """Returns the same initializer, with the same numbers, for a kernel with these axes; those it has win."""
        if self.input_axes is not None and self.output_axes is not None:
            return self
        made = VarianceScaling(self.scale, self.mode, self.distribution, self.seed, input_axes, output_axes)
        made._config_seed = self._config_seed
        return made


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise LayerError(
            f"Argument {name} of an initializer is unknown", got={name: value}, expected=f"one of {', '.join(allowed)}"
        )


def _fans(shape: Shape, input_axes: Sequence[int] | None, output_axes: Sequence[int] | None) -> tuple[int, int]:
    if input_axes is not None and output_axes is not None:
        return math.prod(shape[axis] for axis in input_axes), math.prod(shape[axis] for axis in output_axes)
    if len(shape) < 2:
        return math.prod(shape), math.prod(shape)
    window = math.prod(shape[:-2])
    return shape[-2] * window, shape[-1] * window


def _scaled(name: str, mode: str, scale: float, distribution: str, doc: str) -> type[VarianceScaling]:
    """Makes a named case of `VarianceScaling`: its settings are its name."""

    def __init__(  # noqa: N807
        self: VarianceScaling,
        seed: int | None = None,
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
    ) -> None:
        VarianceScaling.__init__(self, scale, mode, distribution, seed, input_axes, output_axes)

    def get_config(self: VarianceScaling) -> dict[str, Any]:
        config = VarianceScaling.get_config(self)
        return {
            key: config[key]
            for key in ("seed", "input_axes", "output_axes")
            if config[key] is not None or key == "seed"
        }

    made = type(
        name,
        (VarianceScaling,),
        {"__init__": __init__, "get_config": get_config, "__doc__": doc, "__module__": __name__, "__qualname__": name},
    )
    short = "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
    return _named(short)(made)


GlorotUniform: Callable[..., VarianceScaling] = _scaled(
    "GlorotUniform", "fan_avg", 1.0, "uniform", "Even, variance `2 / (inputs + outputs)`: the default of kernels."
)
GlorotNormal: Callable[..., VarianceScaling] = _scaled(
    "GlorotNormal", "fan_avg", 1.0, "truncated_normal", "Normal, variance `2 / (inputs + outputs)`."
)
HeUniform: Callable[..., VarianceScaling] = _scaled(
    "HeUniform", "fan_in", 2.0, "uniform", "Even, variance `2 / inputs`, for layers before a ReLU."
)
HeNormal: Callable[..., VarianceScaling] = _scaled(
    "HeNormal", "fan_in", 2.0, "truncated_normal", "Normal, variance `2 / inputs`, for layers before a ReLU."
)
LecunUniform: Callable[..., VarianceScaling] = _scaled(
    "LecunUniform", "fan_in", 1.0, "uniform", "Even, variance `1 / inputs`."
)
LecunNormal: Callable[..., VarianceScaling] = _scaled(
    "LecunNormal", "fan_in", 1.0, "truncated_normal", "Normal, variance `1 / inputs`."
)


@_named("orthogonal", "OrthogonalInitializer")
class Orthogonal(_Random):
    """A matrix with orthonormal columns (rows, where it has fewer of them); more axes are folded into the rows.

    Args:
        gain: a factor.
        seed: see the base class.
    """

    def __init__(self, gain: float = 1.0, seed: int | None = None) -> None:
        super().__init__(seed)
        self.gain = gain

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        if values.dim() < 2:
            raise LayerError(
                "Orthogonal values need a matrix", got={"shape": tuple(values.shape)}, expected="two or more axes"
            )
        matrix = values.view(-1, values.shape[-1])
        torch.nn.init.orthogonal_(matrix, self.gain, generator=generator)

    def get_config(self) -> dict[str, Any]:
        """See `Initializer`."""
        return {"gain": self.gain, **super().get_config()}


def get(identifier: Any) -> Any:
    """Returns the initializer that `identifier` names.

    Args:
        identifier: a name (`"glorot_uniform"`, `"GlorotUniform"`), a config as `narrowcast.saving.serialize` writes it,
            an initializer, any function of a shape and a dtype, or `None`, which is returned.

    Raises:
        LayerError: there is no such initializer.

    Example:
        >>> get("zeros")((2,)).tolist()
        [0.0, 0.0]
    """
    if identifier is None or isinstance(identifier, Initializer):
        return identifier
    if isinstance(identifier, dict):
        return get(deserialize(identifier))
    if isinstance(identifier, str) and identifier in _CLASSES:
        return _CLASSES[identifier]()
    if callable(identifier):
        return identifier() if isinstance(identifier, type) else identifier
    near = closest(str(identifier), _CLASSES)
    raise LayerError(
        "Initializer is unknown",
        got={"initializer": identifier},
        expected="the name of an initializer, or a function of shape and dtype",
        suggestion=near[0] if near else None,
    )
