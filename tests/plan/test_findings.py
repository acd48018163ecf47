"""What is told of a map that does not fit: every finding, once, with what to do."""

from __future__ import annotations

import pytest

from narrowcast.dtype_policies import DTypePolicyMap, get
from narrowcast.errors import PatternError, PlanError
from narrowcast.plan import Status, Tree
from tests.plan.models import container, encoder, plan, site

INT8 = "int8_from_float32"


def _error(tree: Tree, policy: object, **kwargs: object) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(tree, policy, **kwargs)
    return caught.value


def test_two_patterns_with_different_policies_on_one_site_are_an_error() -> None:
    assert _error(encoder(), {".*query": "int8", "layer/.*": "bfloat16"}).findings == (
        "Rules '.*query' (int8_from_keep) and 'layer/.*' (bfloat16) overlap at 3 layers, the first 'layer/0/query'; "
        "add a rule for the exact path, or make the patterns exclude each other",
    )


def test_a_rule_that_matches_no_site_is_an_error_with_near_paths() -> None:
    error = _error(encoder(), {r"layers/\d+/query": "int8", "head": "int8"})
    assert error.findings == (r"Rule 'layers/\d+/query' matches no layer; did you mean 'layer/0/query'?",)


def test_a_rule_that_resembles_nothing_is_told_without_suggestion() -> None:
    assert _error(encoder(), {"zzzzzzzzzz": "int8"}).findings == ("Rule 'zzzzzzzzzz' matches no layer",)


def test_an_optional_rule_may_match_nothing() -> None:
    rules = DTypePolicyMap(None, {".*/lm_head": "keep", "head": "int8"}, optional=[".*/lm_head"])
    assert plan(encoder(), rules).warnings == ()


def test_a_rule_none_of_whose_sites_can_carry_its_mode_is_an_error() -> None:
    assert _error(encoder(), {".*norm": "int8", ".*small": "int8"}).findings == (
        "Rule '.*norm' asks for int8, and none of the 3 layers it reaches can have it: "
        "int8 does not exist for ('norm',)",
        "Rule '.*small' asks for int8, and none of the 3 layers it reaches can have it: fewer than 8 outputs",
    )


def test_a_rule_that_names_a_container_is_told_to_name_what_is_below() -> None:
    assert _error(encoder(), {"layer": "int8"}).findings == (
        "Rule 'layer' asks for int8, and the one layer it reaches cannot have it: "
        "a container has no floating parameters of its own; for the layers below it, write 'layer/.*'",
    )


def test_a_rule_that_wins_at_containers_only_is_told_what_it_loses_to() -> None:
    tree = Tree((container(""), site("0")))
    (finding,) = _error(tree, {".*": "int8", "0": "keep"}).findings
    assert finding == (
        "Rule '.*' asks for int8, and the one layer it reaches cannot have it: "
        "a container has no floating parameters of its own; elsewhere it loses to '0'"
    )


def test_a_float_policy_that_is_refused_everywhere_is_an_error() -> None:
    tree = Tree((container(""), site("script", details=(("refuses", "it is TorchScript"),))))
    assert _error(tree, {"script": "bfloat16"}).findings == (
        "Rule 'script' asks for bfloat16, and the one layer it reaches cannot have it: it is TorchScript",
    )


def test_every_finding_is_told_at_once() -> None:
    error = _error(
        encoder(),
        {".*query": "int8", "layer/0/.*": "bfloat16", "nothing": "int8", ".*/1/norm": "int8"},
        fallback="error",
    )
    assert [finding.split(" ")[0:2] for finding in error.findings] == [
        ["Rules", "'.*query'"],
        ["Rule", "'nothing'"],
        ["Rule", "'.*/1/norm'"],
    ]
    assert str(error).startswith("Policy map does not fit Encoder:\n  - Rules '.*query'")
    assert str(error).endswith("Correct the map, or plan with strict=False to keep these as warnings.")


def test_findings_become_warnings_when_not_strict() -> None:
    rules = {".*query": "int8", "layer/.*": "bfloat16", "nothing": "int8"}
    findings = _error(encoder(), rules).findings
    bound = plan(encoder(), rules, strict=False)
    assert bound.warnings[: len(findings)] == findings
    assert bound["layer/0/query"].rule == ".*query"
    assert bound["layer/0/query"].losers[0].reason == "overlaps with the rule that counts, which comes first"


def test_a_mode_without_a_source_beside_a_default_of_another_dtype_is_a_warning() -> None:
    policies = DTypePolicyMap("mixed_bfloat16", {"layer/./query": "int8"})
    bound = plan(encoder(2), policies)
    assert bound["layer/0/query"].given.name == "int8_from_float32"
    assert bound.warnings == (
        "Rule 'layer/./query' asks for int8 and names no source policy: 2 layers, the first 'layer/0/query', "
        "will start from the present dtype, float32, and not from the default; "
        "for that write 'int8_from_mixed_bfloat16'",
    )


@pytest.mark.parametrize("default", ["float32", "keep", None, "int8"], ids=str)
def test_a_mode_without_a_source_is_no_warning_where_the_default_says_nothing_else(default: str | None) -> None:
    assert plan(encoder(2), DTypePolicyMap(default, {"layer/./query": "int8"})).warnings == ()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("query.weight", ".*/query"),
        ("0.query", ".*/0/query"),
        ("query/weight", ".*/query"),
        ("layer/*/que*", "layer/.*/que.*"),
        ("0/query", ".*/0/query"),
    ],
)
def test_a_key_in_another_syntax_is_told_in_this_one(key: str, hint: str) -> None:
    (finding,) = _error(encoder(2), {key: "int8"}).findings
    assert finding == f"Rule '{key}' matches no layer; did you mean {hint!r}?"


@pytest.mark.parametrize(("key", "meant"), [("layer.0.query", "layer/0/query"), ("layer.1.*", "layer/1/.*")])
def test_dots_that_match_as_any_character_are_a_warning(key: str, meant: str) -> None:
    assert plan(encoder(12), {key: "int8"}).warnings == (
        f"Rule '{key}' has dots, each of which stands for any character; paths are joined by slashes, "
        f"so '{meant}' may be meant",
    )


@pytest.mark.parametrize("key", ["layer/./query", r"layer/\d+/query", "layer.*", "head.*"])
def test_dots_that_a_pattern_needs_are_no_warning(key: str) -> None:
    assert plan(encoder(12), {key: "int8"}).warnings == ()


def test_a_suggested_key_can_be_pasted_into_a_policy_file() -> None:
    (finding,) = _error(encoder(2), {r"layers\d/query/weight": "int8", "head": "int8"}).findings[:1]
    assert "\\\\" not in finding


def test_a_rule_that_matches_and_never_wins_is_a_warning() -> None:
    bound = plan(encoder(1), {"layer/0/query": "int8", "layer/./query": "bfloat16"})
    assert bound.warnings == ("Rule 'layer/./query' matches 1 layer and wins at none: it loses to 'layer/0/query'",)


def test_a_conflict_with_a_carried_policy_leaves_the_site_when_not_strict() -> None:
    row = plan(encoder(policy=get(INT8)), {"head": "bfloat16"}, strict=False)["head"]
    assert (row.status, row.given, row.reason) == (
        Status.NOT_A_TARGET,
        get(INT8),
        f"carries {INT8}; dequantize it first",
    )


def test_bad_patterns_are_refused_before_anything_is_bound() -> None:
    with pytest.raises(PatternError):
        plan(encoder(), {"(a+)+x": "int8"})
