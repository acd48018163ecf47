"""Arrays of every framework: whose they are, and casting floats, alone and in containers."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys

import jax
import jax.numpy
import ml_dtypes
import numpy
import pytest
import torch

from narrowcast import arrays
from narrowcast.dtype_policies import DTypePolicy, dtypes
from narrowcast.errors import UnsupportedError
from tests.dtype_policies.outcomes import keras

ONES = {
    "torch": torch.ones(2),
    "numpy": numpy.ones(2, numpy.float32),
    "jax": jax.numpy.ones(2),
    "keras": keras.KerasTensor((None, 2), "float32"),
}


@pytest.mark.parametrize("name", ONES)
def test_array_is_known_by_its_framework(name):
    assert arrays.framework(ONES[name]) == name


@pytest.mark.parametrize(
    "x, name",
    [
        (torch.nn.Parameter(torch.ones(2)), "torch"),
        (torch.ones(2, device="meta"), "torch"),
        (numpy.float32(1), "numpy"),
        (numpy.ma.ones(2), "numpy"),
        (jax.ShapeDtypeStruct((2,), jax.numpy.float32), "jax"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_array_of_a_special_kind_is_known_too(x, name):
    assert arrays.framework(x) == name


@pytest.mark.parametrize(
    "x", [1, 1.0, True, None, "x", [1.0], {}, object(), numpy, torch.float32], ids=lambda value: type(value).__name__
)
def test_what_is_no_array_has_no_framework(x):
    assert arrays.framework(x) is None
    assert not arrays.is_floating(x)


def test_traced_arrays_of_jax_are_arrays():
    seen = []
    jax.jit(lambda x: seen.append((arrays.framework(x), arrays.is_floating(x))) or x)(jax.numpy.ones(2))
    assert seen == [("jax", True)]


@pytest.mark.parametrize("name", ["torch", "numpy", "jax", "keras"])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int32", "uint8", "bool", "complex64"]
)
def test_floating_means_floats_only(name, dtype):  # H-87
    make = {
        "torch": lambda: torch.ones(2).to(getattr(torch, dtype)),
        "numpy": lambda: numpy.ones(2).astype(getattr(ml_dtypes, dtype, dtype)),
        "jax": lambda: jax.numpy.ones(2).astype(dtype),
        "keras": lambda: keras.KerasTensor((2,), dtype),
    }
    x = make[name]()
    assert arrays.dtype_name(x) == dtype
    assert arrays.is_floating(x) == dtypes.get(dtype).is_floating


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_gives_the_same_kind_of_array(name, dtype):
    x = ONES[name]
    cast = arrays.cast_floating(x, dtype)
    assert type(cast) is type(x)
    assert arrays.dtype_name(cast) == dtype
    assert arrays.dtype_name(x) == "float32"  # H-03
    assert cast is not x


@pytest.mark.parametrize("name", ["torch", "numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_rounds_as_ml_dtypes_does(name, dtype):
    values = numpy.linspace(-3, 3, 101, dtype=numpy.float32)
    make = {"torch": torch.from_numpy, "numpy": numpy.asarray, "jax": jax.numpy.asarray}
    cast = arrays.cast(make[name](values), dtype)
    back = numpy.asarray(cast.float() if name == "torch" else cast).astype(numpy.float32)
    expected = values.astype(getattr(ml_dtypes, dtype, dtype)).astype(numpy.float32)
    assert (back == expected).all()


def test_gradient_flows_through_a_cast():
    x = torch.ones(2, requires_grad=True)
    arrays.cast_floating(x, "bfloat16").sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_numpy_scalar_stays_a_numpy_scalar():
    assert type(arrays.cast_floating(numpy.float64(1.5), "float16")) is numpy.float16


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(3),
        numpy.arange(3),
        jax.numpy.arange(3),
        torch.ones(2) > 0,
        torch.ones(2).to(torch.complex64),
        1.5,
        "x",
    ],
    ids=repr,
)
def test_everything_but_floats_is_passed_on(x):  # H-09
    assert arrays.cast_floating(x, "float16") is x


@pytest.mark.parametrize("name", ["torch", "numpy", "jax"])
def test_array_that_has_the_dtype_is_passed_on(name):
    assert arrays.cast_floating(ONES[name], "float32") is ONES[name]


def test_dtype_that_a_framework_lacks_is_named():
    with pytest.raises(UnsupportedError, match=r"Arrays of torch cannot have this dtype. Got dtype='float6_e2m3fn'"):
        arrays.cast(torch.ones(2), "float6_e2m3fn")


def test_only_arrays_are_cast():
    with pytest.raises(TypeError, match=r"Only arrays can be cast. Got an object of type float"):
        arrays.cast(1.0, "float16")


# Containers


class Point(collections.namedtuple("Point", ["x", "ids"])):
    """A named tuple of a class of its own."""


class Batch(dict):
    """A dict with an attribute."""

    note = "kept"


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    ids: torch.Tensor
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


X, IDS = torch.ones(2), torch.arange(2)
CONTAINERS = [
    [X, IDS],
    (X, IDS),
    {"x": X, "ids": IDS},
    collections.OrderedDict(x=X, ids=IDS),
    collections.defaultdict(list, x=X),
    Batch(x=X),
    Point(X, IDS),
    Inputs(X, IDS),
    Frozen(X),
    [{"deep": (X, [Point(X, IDS)])}],
]


def leaves(x):
    if isinstance(x, torch.Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else vars(x).values() if dataclasses.is_dataclass(x) else x
    return [leaf for value in values if not isinstance(value, int) for leaf in leaves(value)]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda value: type(value).__name__)
def test_floats_in_containers_are_cast_and_the_type_stays(container):
    cast = arrays.cast_floating(container, "float16")
    assert type(cast) is type(container)
    assert {leaf.dtype for leaf in leaves(cast)} <= {torch.float16, torch.int64}
    assert {leaf.dtype for leaf in leaves(container)} <= {torch.float32, torch.int64}
    assert [leaf for leaf in leaves(cast) if leaf.dtype == torch.int64] == [
        leaf for leaf in leaves(container) if leaf is IDS
    ]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda value: type(value).__name__)
def test_container_in_which_nothing_changes_is_passed_on(container):
    assert arrays.cast_floating(container, "float32") is container


def test_function_that_writes_into_its_container_still_does():
    given = {"ids": IDS}
    arrays.cast_floating(given, "float16")["new"] = 1
    assert given["new"] == 1


def test_parts_in_which_nothing_changes_are_the_same_objects():
    kept = {"ids": IDS}
    cast = arrays.cast_floating([X, kept], "float16")
    assert cast[1] is kept


def test_dataclass_is_copied_without_being_initialised_again():
    cast = arrays.cast_floating(Inputs(X, IDS), "float16")
    assert cast.made == 1


def test_dict_subclass_keeps_its_attributes_and_factory():
    assert arrays.cast_floating(CONTAINERS[4], "float16").default_factory is list
    assert arrays.cast_floating(CONTAINERS[5], "float16").note == "kept"


def test_packed_sequence_is_cast_as_a_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    cast = arrays.cast_floating(packed, "bfloat16")
    assert type(cast) is type(packed)
    assert (cast.data.dtype, cast.batch_sizes.dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize("x", [{1.5}, collections.deque([X]), object()], ids=lambda value: type(value).__name__)
def test_unknown_types_are_passed_on(x):
    assert arrays.cast_floating(x, "float16") is x


def test_class_of_a_dataclass_is_passed_on():
    assert arrays.cast_floating(Inputs, "float16") is Inputs


# convert_input


@pytest.mark.parametrize("name", ONES)
def test_convert_input_gives_the_same_kind_of_array(name):
    cast = DTypePolicy("mixed_float16").convert_input(ONES[name], True, "float16")
    assert (arrays.framework(cast), arrays.dtype_name(cast)) == (name, "float16")


@pytest.mark.parametrize("name", ONES)
def test_convert_input_without_autocast_passes_on(name):
    assert DTypePolicy("mixed_float16").convert_input(ONES[name], False, "float16") is ONES[name]


def test_symbolic_tensor_given_to_two_policies_stays_as_it_is():  # H-03
    x = keras.KerasTensor((None, 2), "float32")
    casts = [DTypePolicy(name).convert_input(x, True, name) for name in ("float16", "bfloat16")]
    assert [cast.dtype for cast in casts] == ["float16", "bfloat16"]
    assert x.dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.float16, numpy.float16, "float16"], ids=repr)
def test_convert_input_takes_dtype_objects(dtype):
    assert DTypePolicy("float16").convert_input(torch.ones(2), True, dtype).dtype == torch.float16


@pytest.mark.parametrize("dtype", ["int32", "bool", "string", "complex64"])
def test_floats_are_cast_to_floats_only(dtype):
    x = torch.tensor([1.7])
    assert DTypePolicy(dtype).convert_input(x, True, dtype) is x


def test_casting_numpy_arrays_loads_no_framework():
    code = (
        "import sys, numpy; from narrowcast.arrays import cast_floating; "
        "print(cast_floating(numpy.ones(1), 'bfloat16').dtype, 'torch' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bfloat16", "False", "False"]
