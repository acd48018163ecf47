"""Trees as values."""

from __future__ import annotations

import json
import pickle

import pytest

from narrowcast.dtype_policies import DTypePolicy, get
from narrowcast.errors import PathError
from narrowcast.plan import Member, Parameter, Site, Tree
from tests.plan.models import container, encoder, site, tied


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        ((3, 5), "float32", 60),
        ((), "bfloat16", 2),
        ((0, 4), "float32", 0),
        ((3,), "int4", 2),
        ((7,), "float8_e4m3fn", 7),
    ],
)
def test_bytes_of_a_parameter(shape: tuple[int, ...], dtype: str, num_bytes: int) -> None:
    assert Parameter("weight", shape, dtype).num_bytes == num_bytes


def test_a_site_goes_by_its_first_path_and_is_found_by_all() -> None:
    tree = Tree((container(""), site("a", "b/c")))
    assert tree["b/c"] is tree["a"]
    assert (tree["b/c"].path, tree.paths) == ("a", ("", "a", "b/c"))
    assert "b/c" in tree
    assert "c" not in tree


def test_the_dtype_of_a_site_is_that_of_most_bytes() -> None:
    parameters = (Parameter("a", (9,), "bfloat16"), Parameter("b", (4,), "float32"), Parameter("c", (99,), "int64"))
    assert Site((Member(("x",), "other", "X", parameters),)).dtype == "bfloat16"
    assert site("x", shape=None).dtype is None
    assert site("x", dtype="int64").dtype is None


def test_the_dtype_of_a_tree_is_that_of_most_bytes() -> None:
    assert Tree((site("a", shape=(9,), dtype="bfloat16"), site("b", shape=(4,)))).dtype == "bfloat16"
    assert Tree((container(""),)).dtype is None


def test_a_tied_parameter_counts_once() -> None:
    both = tied()["head"]
    assert [parameter.name for parameter in both.parameters] == ["weight", "bias"]
    assert both.num_bytes == 100 * 32 * 4 + 100 * 4
    assert both.kinds == ("embedding", "linear")


def test_a_parameter_that_one_module_has_twice_counts_once() -> None:
    weight = Parameter("weight", (4,), "float32")
    twice = Site(
        (Member(("x",), "other", "X", (weight, Parameter("again", (4,), "float32"))),), tied=(("x.weight", "x.again"),)
    )
    assert twice.num_bytes == 16


def test_a_tree_goes_through_json_and_back_unchanged() -> None:
    policies = (DTypePolicy("mixed_bfloat16"), get("float8_from_float32"), None)
    sites = [
        site(f"a/{i}", policy=policy, details=(("groups", 2), ("padding_mode", "zeros")))
        for i, policy in enumerate(policies)
    ]
    for tree in (encoder(), tied(), Tree(tuple(sites), "torch", "Net")):
        assert Tree.from_json(json.loads(json.dumps(tree.to_json()))) == tree


def test_trees_are_values() -> None:
    assert encoder() == encoder()
    assert hash(encoder()) == hash(encoder())
    assert pickle.loads(pickle.dumps(encoder())) == encoder()


def test_a_tree_is_read_as_a_table() -> None:
    lines = str(encoder(2)).splitlines()
    assert lines[0].split() == ["path", "layers", "kind", "class", "parameters", "bytes"]
    assert any(line.startswith("layer/{0,1}/query") for line in lines)
    assert "<table" in encoder(2)._repr_html_()


def test_an_absent_path_is_an_error_with_the_nearest() -> None:
    with pytest.raises(PathError) as caught:
        encoder()["layer/0/quary"]
    assert str(caught.value) == (
        "Path 'layer/0/quary' is not in Encoder. Expected the attribute path of a layer, joined by '/'; "
        "did you mean 'layer/0/query'? List the paths with `narrowcast plan MODEL`."
    )
