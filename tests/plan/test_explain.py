"""Why a site has the policy it has."""

from __future__ import annotations

import json

import pytest

from narrowcast.dtype_policies import get
from narrowcast.errors import PathError
from tests.plan.models import encoder, plan, tied


def test_an_explanation_tells_winner_losers_and_what_is_given() -> None:
    text = str(plan(encoder(), {r"layer/\d+/.*": "bfloat16", "layer/0/query": "int8"}).explain("layer/0/query"))
    assert text == (
        "layer/0/query: linear, net.Linear\n"
        "  holds     weight 64×32 float32\n"
        "  asked     int8_from_keep, by rule 'layer/0/query'\n"
        "  lost      rule 'layer/\\d+/.*' (bfloat16): an exact key wins over patterns\n"
        "  status    applied\n"
        "  given     int8_from_float32 (computes in float32, variables in float32)\n"
        "  kernel    int8 kernel\n"
        "  replaces  float32 kernel\n"
        "  bytes     8.2 kB now, 2.0 kB after, and 16 B of kernel layout"
    )


def test_an_explanation_says_where_nothing_was_asked() -> None:
    text = str(plan(encoder(), {"head": "int8"}).explain("embedding"))
    assert "asked     nothing: no rule matches, and the map has no default" in text


def test_an_explanation_says_where_the_default_counts() -> None:
    assert "asked     int8_from_keep, by the default: no rule matches" in str(plan(encoder(), "int8").explain("head"))


def test_an_explanation_tells_fallbacks_and_why() -> None:
    text = str(plan(encoder(), {"layer/.*": "int8_from_mixed_bfloat16"}).explain("layer/0/small"))
    assert "status    fell back" in text
    assert "given     mixed_bfloat16 (computes in bfloat16, variables in float32)" in text
    assert "reason    fewer than 8 outputs" in text


def test_an_explanation_tells_ties_and_other_paths() -> None:
    text = str(plan(tied(), {}).explain("head"))
    assert text.startswith("head: embedding and linear, net.Embedding")
    assert "also at   embedding" in text
    assert "tied      embedding.weight = head.weight" in text


def test_an_explanation_tells_input_casts() -> None:
    text = str(plan(encoder(), {"head": "bfloat16"}).explain("layer/0/query"))
    assert "inputs    cast to its own dtype, since other layers' policies change what flows in" in text


def test_an_explanation_tells_what_the_site_carries_now() -> None:
    assert "carries   int8_from_float32" in str(plan(encoder(policy=get("int8_from_float32")), {}).explain("head"))


def test_the_root_can_be_explained() -> None:
    assert str(plan(encoder(), {}).explain("")).startswith("(root): container, net.Container")


def test_an_explanation_is_data_too() -> None:
    data = json.loads(json.dumps(plan(encoder(), {"head": "int8"}).explain("head").to_json()))
    assert data["path"] == "head"
    assert (data["asked"], data["given"], data["rule"]) == (
        {"class_name": "QuantizedDTypePolicy", "config": {"mode": "int8", "source_name": "keep"}},
        {"class_name": "QuantizedDTypePolicy", "config": {"mode": "int8", "source_name": "float32"}},
        "head",
    )
    assert data["parameters"] == [{"name": "weight", "shape": [100, 32], "dtype": "float32"}]


def test_an_absent_path_is_an_error() -> None:
    with pytest.raises(PathError, match="Path 'nose' is not in Encoder"):
        plan(encoder(), {}).explain("nose")
