"""What one plan does otherwise than another."""

from __future__ import annotations

import json

import pytest

from narrowcast.errors import PolicyTypeError
from tests.plan.models import encoder, plan


def test_a_plan_does_not_differ_from_itself() -> None:
    difference = plan(encoder(), "int8").diff(plan(encoder(), "int8"))
    assert not difference
    assert len(difference) == 0
    assert str(difference).splitlines()[-1] == "0 layers differ; 24.1 kB -> 24.1 kB (+0 B)"


def test_no_difference_is_one_line() -> None:
    bound = plan(encoder(), "int8")
    assert str(bound.diff(bound)).startswith("0 layers differ; ")


def test_only_plans_are_compared() -> None:
    with pytest.raises(PolicyTypeError, match=r"Only plans can be compared. Got other=\{'head': 'int8'\}"):
        plan(encoder(), "int8").diff({"head": "int8"})  # type: ignore[arg-type]


def test_differences_are_told_by_path() -> None:
    difference = plan(encoder(), {"layer/.*": "int8"}).diff(
        plan(encoder(), {"layer/.*": "int8", "layer/1/query": "keep"})
    )
    assert [site.path for site in difference.sites] == ["layer/1/query"]
    (site,) = difference.sites
    assert site.old is not None
    assert site.new is not None
    assert (site.old.given.name, site.new.given.name) == ("int8_from_float32", "keep")
    assert difference.new.bytes_after - difference.old.bytes_after == 64 * 32 * 3


def test_another_rule_for_the_same_policy_is_no_difference() -> None:
    assert not plan(encoder(), {"head": "int8"}).diff(plan(encoder(), {"hea.": "int8"}))


def test_layers_that_only_one_model_has_are_differences() -> None:
    difference = plan(encoder(2), {}).diff(plan(encoder(3), {}))
    assert [(site.path, site.old, site.new is not None) for site in difference.sites] == [
        (path, None, True) for path in ("layer/2", "layer/2/query", "layer/2/small", "layer/2/norm")
    ]
    assert "(no such layer)" in str(difference)
    back = plan(encoder(3), {}).diff(plan(encoder(2), {}))
    assert next((site.path, site.new) for site in back.sites) == ("layer/2", None)


def test_the_table_folds_layers_that_differ_alike() -> None:
    table = plan(encoder(), {}).diff(plan(encoder(), {r"layer/\d+/(query|norm)": "bfloat16"})).table()
    assert [row[:2] for row in table.rows if "query" in row[0] or "norm" in row[0]] == [
        ("layer/{0..2}/query", "3"),
        ("layer/{0..2}/norm", "3"),
    ]
    assert [row[:4] for row in table.rows][:1] == [("embedding", "1", "keep", "keep (casts inputs)")]


def test_the_table_can_show_every_layer() -> None:
    difference = plan(encoder(), {}).diff(plan(encoder(), {".*": "bfloat16"}))
    assert len(difference.table(every=True).rows) == len(difference) == 16
    assert len(difference.table().rows) < 16


def test_a_difference_is_data_too() -> None:
    data = json.loads(json.dumps(plan(encoder(2), {}).diff(plan(encoder(3), {"head": "int8"})).to_json()))
    assert {site["path"] for site in data["sites"]} == {
        "head",
        "layer/2",
        "layer/2/query",
        "layer/2/small",
        "layer/2/norm",
    }
    assert data["old"]["bytes_after"] == 43264
