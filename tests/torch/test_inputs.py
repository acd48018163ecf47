"""What is cast of the arguments of a call, and what is passed on as the same object."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast import arrays
from narrowcast.torch.inputs import cast_arguments, cast_floats, cast_mask

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    values: torch.Tensor
    names: list[str] = field(default_factory=list)
    count: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    values: torch.Tensor


FLOAT = torch.ones(2)
UNTOUCHED = [
    torch.arange(3),
    torch.tensor([True, False]),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, dtype=torch.uint8),
    torch.ones(2, dtype=torch.bfloat16),
    np.arange(3),
    1.7,
    3,
    True,
    None,
    "text",
    torch.Size([2, 3]),
    torch.float32,
    object(),
    Batch,
]


@pytest.mark.parametrize("value", UNTOUCHED, ids=lambda value: type(value).__name__)
def test_what_is_no_float_of_another_dtype_is_the_same_object(value):
    assert cast_floats(value, torch.bfloat16) is value


@pytest.mark.parametrize("value", UNTOUCHED, ids=lambda value: type(value).__name__)
def test_containers_in_which_nothing_changes_are_the_same_objects(value):
    for container in ([value], (value,), {"a": value}, Pair(value, 1), Batch(value), OrderedDict(a=[value])):
        assert cast_floats(container, torch.bfloat16) is container


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_tensors_get_the_dtype(dtype):
    assert cast_floats(FLOAT, dtype).dtype is dtype


@pytest.mark.parametrize(
    "container, read",
    [
        ([FLOAT, 1], lambda c: c[0]),
        ((FLOAT, 1), lambda c: c[0]),
        ({"a": FLOAT, "b": 1}, lambda c: c["a"]),
        ({"a": [(FLOAT,)]}, lambda c: c["a"][0][0]),
        (OrderedDict(a=FLOAT), lambda c: c["a"]),
        (Pair(1, FLOAT), lambda c: c.right),
        (Batch(FLOAT, ["x"]), lambda c: c.values),
        (Frozen(FLOAT), lambda c: c.values),
        (torch.max(FLOAT.view(1, 2), 1), lambda c: c.values),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_rebuilt_as_their_own_type_and_the_given_one_stays(container, read):
    cast = cast_floats(container, torch.bfloat16)
    assert type(cast) is type(container)
    assert read(cast).dtype is torch.bfloat16
    assert read(container).dtype is torch.float32


def test_fields_that_the_constructor_does_not_take_are_kept():
    batch = Batch(FLOAT, ["x"])
    batch.count = 7
    cast = cast_floats(batch, torch.bfloat16)
    assert (cast.count, cast.names) == (7, ["x"])


def test_packed_sequence_keeps_its_lengths():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    cast = cast_floats(packed, torch.bfloat16)
    assert cast.data.dtype is torch.bfloat16
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)


def test_parts_in_which_nothing_changes_are_shared():
    inner = [1, 2]
    assert cast_floats({"a": inner, "b": FLOAT}, torch.bfloat16)["a"] is inner


def test_arrays_of_numpy_follow_the_same_rule():
    cast = cast_floats({"a": np.ones(2, np.float32), "b": np.arange(2)}, torch.float64)
    assert cast["a"].dtype == np.float64
    assert cast["b"].dtype == np.arange(2).dtype


LEAVES = st.sampled_from([FLOAT, torch.arange(2), np.ones(2, np.float32), 1.5, "text", None])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner),
        st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        inner.map(Batch),
    ),
)


def described(tree):
    """The types of everything in a tree, and the dtypes of its arrays."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        return type(tree), str(tree.dtype)
    if isinstance(tree, dict):
        return type(tree), {key: described(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [described(item) for item in tree]
    return (type(tree), described(tree.values)) if isinstance(tree, Batch) else tree


@given(TREES)
def test_fast_form_does_what_the_general_one_does(tree):
    assert described(cast_floats(tree, torch.float64)) == described(arrays.cast_floating(tree, "float64"))


def test_gradients_flow_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    cast_floats([x], torch.bfloat16)[0].sum().backward()
    assert x.grad.dtype is torch.float32


def test_arguments_are_cast_by_position_and_name():
    args, kwargs = cast_arguments((FLOAT, 2), {"y": {"z": FLOAT}}, torch.float16)
    assert args[0].dtype is torch.float16
    assert kwargs["y"]["z"].dtype is torch.float16


def test_mask_named_by_position_or_name_saturates_and_others_overflow():
    large = torch.tensor([-1e9])
    args, kwargs = cast_arguments((large, large), {"mask": large}, torch.float16, frozenset({1, "mask"}))
    assert args[0].item() == -torch.inf
    assert args[1].item() == kwargs["mask"].item() == -65504


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_most_negative_number_of_a_wider_dtype_stays_finite_in_a_mask(dtype):
    mask = cast_mask(torch.tensor([torch.finfo(torch.float32).min]), dtype)
    assert mask.dtype is dtype
    assert mask.item() == torch.finfo(dtype).min


def test_infinities_and_nan_of_a_mask_stay():
    mask = cast_mask(torch.tensor([-torch.inf, torch.inf, torch.nan, 0.5]), torch.float16)
    assert mask[:2].tolist() == [-torch.inf, torch.inf]
    assert mask[2].isnan()
    assert mask[3].item() == 0.5


def test_boolean_mask_stays_boolean():
    mask = torch.tensor([True])
    assert cast_mask(mask, torch.float16) is mask
