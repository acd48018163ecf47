"""`DTypePolicy`: the dtype a layer computes in and the dtype it keeps its variables in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

from narrowcast import arrays
from narrowcast.dtype_policies import dtypes
from narrowcast.errors import PolicyError, PolicyTypeError, closest

__all__ = ["MIXED", "DTypePolicy", "FloatDTypePolicy", "global_policy", "global_source"]

MIXED = {"mixed_float16": ("float16", "float32"), "mixed_bfloat16": ("bfloat16", "float32")}
"""Names that stand for two dtypes: compute dtype, variable dtype."""


class DTypePolicy:
    """The dtype a layer computes in and the dtype it keeps its variables in.

    A policy is a value: it never changes, equal policies are interchangeable, and it can be a key of a dict, pickled
    and copied. `repr` and names are those of Keras.

    Args:
        name: any dtype name (`"float32"`: computes and stores in it), a dtype object of torch, NumPy or JAX, or
            `"mixed_float16"` or `"mixed_bfloat16"`, which compute in 16 bits and store in float32. `None` takes the
            global policy (its source, where that is quantized).

    Raises:
        PolicyTypeError: `name` is neither text nor a dtype.
        PolicyError: no dtype or policy has this name.

    Example:
        >>> policy = DTypePolicy("mixed_bfloat16")
        >>> policy
        <DTypePolicy "mixed_bfloat16">
        >>> policy.compute_dtype, policy.variable_dtype
        ('bfloat16', 'float32')
    """

    _mode_name: str = "float"
    _is_map: ClassVar[bool] = False
    _name: str
    _compute_dtype: str | None
    _variable_dtype: str | None

    def __init__(self, name: Any = None) -> None:
        if name is None:
            name = global_source().name
        name = _policy_name(name)
        compute_dtype, variable_dtype = MIXED.get(name, (name, name))
        self._freeze(name=name, compute_dtype=compute_dtype, variable_dtype=variable_dtype)

    def _freeze(self, **fields: Any) -> None:
        """Sets the fields of a policy under construction."""
        self.__dict__.update({f"_{name}": value for name, value in fields.items()})

    @property
    def name(self) -> str:
        """The name of this policy, from which `get` makes an equal one."""
        return self._name

    @property
    def compute_dtype(self) -> str | None:
        """The dtype that layers cast their floating inputs to, compute in and return.

        Single operations may use wider dtypes inside (sums, norms, softmax). `None` where only the layer knows: for
        `keep`, and for quantized policies whose source is `keep`.
        """
        return self._compute_dtype

    @property
    def variable_dtype(self) -> str | None:
        """The dtype that layers create their variables in, and that regularizers run in.

        Where it differs from `compute_dtype`, layers cast variables to that for the computation. `None` where only the
        layer knows, as for `compute_dtype`.
        """
        return self._variable_dtype

    @property
    def quantization_mode(self) -> str | None:
        """The name of the quantization mode (`int8`, `float8/current`, `gptq`); `None` where nothing is quantized."""
        return None

    @property
    def source(self) -> DTypePolicy | None:
        """The policy that a quantized one starts from; `None` where nothing is quantized."""
        return None

    def convert_input(self, x: Any, autocast: bool, dtype: Any) -> Any:
        """Casts floating arrays to `dtype` and leaves everything else as it is.

        Args:
            x: a tensor of torch, a NumPy or JAX array, a symbolic tensor of Keras or JAX, or containers of these:
                lists, tuples, dicts, dataclasses and their subclasses, at any depth.
            autocast: whether to cast at all.
            dtype: the dtype to cast to, by name or as an object. Floats are never cast to a dtype that is not floating.

        Returns:
            `x` itself where nothing had to be cast. Else a new array of the same framework (a new symbolic tensor: the
            given one stays as it is), in containers of the same type. Integers, bools, complex and Python numbers,
            strings and objects of other kinds are passed on untouched.

        Raises:
            PolicyError: `dtype` is unknown.

        Example:
            >>> import numpy
            >>> DTypePolicy("float16").convert_input(numpy.ones(2), True, "float16").dtype
            dtype('float16')
        """
        name = dtypes.standardize(dtype)
        if not autocast or not dtypes.get(name).is_floating:
            return x
        return arrays.cast_floating(x, name)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal policy, as plain JSON values."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Makes the policy whose `get_config` returned `config`, which stays as it is.

        Args:
            config: what `get_config` returned, here or in Keras.
            custom_objects: classes by name, for policies that hold other policies (maps).
        """
        return cls(**config)

    def _identity(self) -> tuple[Any, ...]:
        """What makes two policies equal."""
        return type(self), self.name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DTypePolicy):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f'<{type(self).__name__} "{self.name}">'

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{self!r} is a value and has no attribute that can be set. Make a new policy instead.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} is a value and has no attribute that can be deleted.")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class FloatDTypePolicy(DTypePolicy):
    """`DTypePolicy` under the name that Keras 3.0 to 3.3 gave it; equal to it.

    Example:
        >>> FloatDTypePolicy("float32") == DTypePolicy("float32")
        True
    """

    def _identity(self) -> tuple[Any, ...]:
        return DTypePolicy, self.name

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self.name}">'


def global_policy() -> DTypePolicy:
    """Returns the global policy."""
    from narrowcast.dtype_policies.default import dtype_policy  # it is itself a policy, so it cannot come first

    return dtype_policy()


def global_source() -> DTypePolicy:
    """Returns the float policy behind the global policy: itself, or its source where it is quantized."""
    policy = global_policy()
    return policy if policy.source is None else policy.source


def _policy_name(value: Any) -> str:
    if isinstance(value, str):
        name = str(value)
        if name in MIXED or name in dtypes.ALL:
            return name
        near = closest(name.rpartition(".")[2], [*dtypes.ALL, *MIXED])
        raise PolicyError(
            "Policy name is unknown",
            got={"name": value},
            expected=f"a dtype name or one of {', '.join(MIXED)}",
            suggestion=near[0] if near else None,
            fix="Quantized policies are made by `get`" if "_from_" in name else "",
        )
    if not isinstance(value, DTypePolicy):
        with contextlib.suppress(PolicyError):
            return dtypes.standardize(value)
    raise PolicyTypeError(
        "Policy name is not text",
        got={"name": value},
        expected="a policy's name such as 'mixed_float16', or a dtype",
    )
