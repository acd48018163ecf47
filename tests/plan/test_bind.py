"""Binding: which rule counts, what comes of it, and what is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, QuantizedFloat8DTypePolicy, get, keep
from narrowcast.errors import PlanError, PolicyError, UnsupportedError
from narrowcast.plan import Plan, Site, Status, Tree, Verdict, as_map
from narrowcast.plan.bind import bind
from tests.plan.models import FakeCarrier, container, encoder, plan, site, tied

INT8 = "int8_from_float32"


def _error(tree: Tree, policy: object, **kwargs: object) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(tree, policy, **kwargs)
    return caught.value


def _given(bound: Plan) -> dict[str, str]:
    return {row.path: row.given.name for row in bound if row.site.parameters}


# Which rule counts


def test_an_exact_key_wins_over_patterns() -> None:
    row = plan(encoder(), {"layer/.*": "bfloat16", "layer/0/query": "int8"})["layer/0/query"]
    assert (row.rule, row.given.name) == ("layer/0/query", INT8)
    assert [(loser.rule, loser.policy, loser.reason) for loser in row.losers] == [
        ("layer/.*", DTypePolicy("bfloat16"), "an exact key wins over patterns")
    ]


def test_a_keep_pattern_wins_over_other_patterns_in_any_order() -> None:
    for rules in ({".*query": "int8", "layer/0/.*": "keep"}, {"layer/0/.*": "keep", ".*query": "int8"}):
        bound = plan(encoder(), rules)
        assert (bound["layer/0/query"].rule, bound["layer/0/query"].status) == ("layer/0/.*", Status.KEPT)
        assert bound["layer/0/query"].losers[0].reason == "keep wins over other patterns"
        assert bound["layer/1/query"].given.name == INT8


def test_an_exact_key_wins_over_a_keep_pattern() -> None:
    bound = plan(encoder(), {"layer/0/.*": "keep", "layer/0/query": "int8"})
    assert bound["layer/0/query"].given.name == INT8


def test_patterns_that_give_the_same_policy_are_no_overlap() -> None:
    bound = plan(encoder(), {".*query": "int8", "layer/0/query|x": "int8"})
    assert bound["layer/0/query"].given.name == INT8
    assert bound["layer/0/query"].losers[0].reason == "gives the same policy as the rule that counts"
    assert bound.warnings == ()


def test_patterns_match_the_whole_path_only() -> None:
    bound = plan(encoder(12), {"layer/1/.*": "bfloat16"})
    assert [row.path for row in bound if row.rule] == ["layer/1/query", "layer/1/small", "layer/1/norm"]


def test_the_root_has_the_empty_path() -> None:
    assert plan(encoder(), {"": "bfloat16"})[""].rule == ""


def test_a_map_without_default_leaves_what_it_does_not_name() -> None:
    bound = plan(encoder(), {"head": "int8"})
    assert {row.path for row in bound if row.status is not Status.KEPT} == {"head"}
    assert (bound["embedding"].asked, bound["embedding"].given) == (None, keep)


def test_the_default_goes_to_what_no_rule_matches() -> None:
    bound = plan(encoder(), DTypePolicyMap("bfloat16", {"head": "keep"}))
    assert bound["embedding"].given.name == "bfloat16"
    assert bound["head"].given is keep


def test_a_quantized_default_that_a_site_cannot_carry_is_no_finding() -> None:
    bound = plan(encoder(), DTypePolicyMap("int8", {"head": "keep"}))
    assert bound["embedding"].status is Status.NOT_A_TARGET
    assert bound.warnings == ()


def test_a_single_policy_goes_to_every_site_that_can_carry_it() -> None:
    bound = plan(encoder(2), "int8")
    assert _given(bound) == {
        "embedding": "keep",
        "layer/0/query": INT8,
        "layer/0/small": "keep",
        "layer/0/norm": "keep",
        "layer/1/query": INT8,
        "layer/1/small": "keep",
        "layer/1/norm": "keep",
        "head": INT8,
    }


def test_a_single_policy_that_no_site_can_carry_is_an_error() -> None:
    tree = Tree((container(""), site("norm", kind="norm", shape=(4,))))
    assert _error(tree, "int8").findings == (
        "The policy for every layer asks for int8, and none of the 2 layers it reaches can have it: "
        "int8 does not exist for ('norm',)",
    )


@pytest.mark.parametrize(
    "policy", ["bfloat16", get("bfloat16"), {"class_name": "DTypePolicy", "config": {"name": "bfloat16"}}]
)
def test_one_policy_may_be_given_in_any_form(policy: object) -> None:
    assert plan(encoder(), policy)["head"].given == DTypePolicy("bfloat16")


def test_a_dict_is_read_as_a_map() -> None:
    assert as_map({"head": "int8"}) == DTypePolicyMap(None, {"head": "int8"})


def test_no_policy_is_refused() -> None:
    with pytest.raises(PolicyError, match="Policy is not given"):
        plan(encoder(), None)


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"Fallback is unknown\. Got fallback='float'\. Expected 'source' or 'error'"):
        plan(encoder(), "int8", fallback="float")


# What comes of it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_mode_alone_starts_from_the_dtype_of_the_site(dtype: str) -> None:
    row = plan(encoder(dtype=dtype), {"head": "int8"})["head"]
    assert row.asked is not None
    assert (row.asked.name, row.given.name) == ("int8_from_keep", f"int8_from_{dtype}")


def test_a_mode_alone_starts_from_the_float_policy_that_the_site_carries() -> None:
    row = plan(encoder(policy=DTypePolicy("mixed_bfloat16")), {"head": "int8"})["head"]
    assert row.given.name == "int8_from_mixed_bfloat16"


def test_a_site_without_floating_parameters_is_no_target() -> None:
    bound = plan(encoder(), DTypePolicyMap("int8", {"head": "int8"}))
    assert (bound["layer"].status, bound["layer"].reason) == (
        Status.NOT_A_TARGET,
        "a container has no floating parameters of its own",
    )


def test_a_pattern_that_also_reaches_other_kinds_leaves_them() -> None:
    row = plan(encoder(), {"layer/.*": "int8"})["layer/0/norm"]
    assert (row.status, row.given, row.rule) == (Status.NOT_A_TARGET, keep, "layer/.*")
    assert row.reason == "int8 does not exist for ('norm',)"


def test_a_fallback_gives_the_source_policy() -> None:
    row = plan(encoder(), {"layer/.*": "int8_from_mixed_bfloat16"})["layer/0/small"]
    assert (row.status, row.given.name, row.reason) == (Status.FELL_BACK, "mixed_bfloat16", "fewer than 8 outputs")
    assert row.kernel == "bfloat16 kernel"


def test_a_fallback_without_a_named_source_leaves_the_site() -> None:
    row = plan(encoder(), {"layer/.*": "int8"})["layer/0/small"]
    assert (row.status, row.given) == (Status.FELL_BACK, keep)
    assert row.bytes_after == row.bytes_before


def test_fallbacks_can_be_refused_and_are_then_refused_even_when_not_strict() -> None:
    for strict in (True, False):
        assert _error(encoder(), {"layer/.*": "int8"}, fallback="error", strict=strict).findings == (
            "Rule 'layer/.*' cannot be carried out at 3 layers, the first 'layer/0/small': fewer than 8 outputs",
        )


def test_rows_tell_bytes_and_kernels() -> None:
    row = plan(encoder(), {"head": "int8"})["head"]
    assert (row.bytes_before, row.bytes_after, row.bytes_kernel) == (12800, 3200, 16)
    assert (row.kernel, row.replaces) == ("int8 kernel", "float32 kernel")


def test_a_mode_that_the_framework_has_not_says_so_with_rule_and_path() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(encoder(), {"head": "float8"})
    assert str(caught.value) == "Mode 'float8' is not carried out here (asked by rule 'head' at 'head'). Wait."


# Present policies


def test_the_same_policy_again_is_applied_already() -> None:
    tree = encoder(policy=get(INT8))
    for policy in ("int8", INT8):
        row = plan(tree, {"head": policy})["head"]
        assert (row.status, row.reason, row.given) == (Status.APPLIED, "carries it already", get(INT8))
        assert row.bytes_before == row.bytes_after == 3200


@pytest.mark.parametrize("policy", ["bfloat16", "float32", "int8_from_bfloat16", "float8"])
def test_another_policy_over_a_quantized_one_is_an_error(policy: str) -> None:
    tree = Tree((container(""), site("a", policy=get(INT8)), site("b", policy=get(INT8))))
    asked = {"float8": "float8_from_keep"}.get(policy, policy)
    assert _error(tree, {"a|b": policy}).findings == (
        f"Rule 'a|b' asks for {asked} where {INT8} is carried out already (2 layers, the first 'a'); "
        "dequantize the model first",
    )


class Float8Carrier(FakeCarrier):
    """Carries every mode of float8 as `FakeCarrier` carries int8."""

    def judge(self, site: Site, policy: DTypePolicy) -> Verdict:
        if isinstance(policy, QuantizedFloat8DTypePolicy):
            return Verdict(Status.APPLIED, "", site.num_bytes, 0, "float8 kernel")
        return super().judge(site, policy)


def _training() -> Tree:
    return Tree((container(""), site("a", policy=get("float8_from_mixed_bfloat16"))))


@pytest.mark.parametrize(
    "asked, given_name", [("float8/current", "float8/current_from_mixed_bfloat16"), ("float8/block_from_bfloat16",) * 2]
)
def test_a_mode_of_the_same_family_takes_over_from_one_that_trains(asked: str, given_name: str) -> None:
    row = bind(_training(), {"a": asked}, Float8Carrier())["a"]
    assert (row.status, row.given.name) == (Status.APPLIED, given_name)


@pytest.mark.parametrize("policy", ["int8", "bfloat16"])
def test_a_policy_of_another_family_over_one_that_trains_is_an_error(policy: str) -> None:
    with pytest.raises(PlanError, match="dequantize the model first"):
        bind(_training(), {"a": policy}, Float8Carrier())


def test_a_float_policy_over_a_float_policy_is_given() -> None:
    row = plan(encoder(policy=DTypePolicy("mixed_bfloat16")), {"head": "float16"})["head"]
    assert (row.status, row.given.name) == (Status.APPLIED, "float16")


def test_keep_keeps_the_policy_that_is_there() -> None:
    bound = plan(encoder(policy=get(INT8)), {"head": "keep"})
    assert (bound["head"].status, bound["head"].given) == (Status.KEPT, get(INT8))
    assert bound["layer/0/query"].given == get(INT8)


# Kept layers among others that change


def test_kept_layers_cast_their_inputs_where_the_plan_changes_activations() -> None:
    bound = plan(encoder(1), {"layer/0/query": "bfloat16"})
    assert {row.path for row in bound if row.casts_inputs} == {"embedding", "layer/0/small", "layer/0/norm", "head"}


@pytest.mark.parametrize("policy", [{"layer/.*": "int8"}, {"layer/.*": "float32"}, {".*": "float32"}, {}])
def test_a_plan_that_changes_no_activation_touches_no_kept_layer(policy: dict[str, str]) -> None:
    assert not any(row.casts_inputs for row in plan(encoder(), policy))


def test_a_quantized_policy_that_computes_in_another_dtype_changes_activations() -> None:
    assert plan(encoder(), {"head": "int8_from_bfloat16"})["layer/0/norm"].casts_inputs


def test_a_layer_that_casts_its_inputs_already_goes_on() -> None:
    tree = Tree((container(""), site("a", policy=keep), site("b")))
    row = plan(tree, {})["a"]
    assert (row.casts_inputs, row.given, row.status) == (True, keep, Status.KEPT)


# Shared and tied


def test_a_rule_on_any_path_of_a_tied_site_applies() -> None:
    for path in ("embedding", "head"):
        bound = plan(tied(), {path: "bfloat16"})
        assert bound["embedding"] is bound["head"]
        assert bound["head"].given.name == "bfloat16"


def test_two_differing_rules_on_the_paths_of_one_site_are_an_error() -> None:
    error = _error(tied(), {"embedding": "float16", "head": "bfloat16"})
    assert error.findings == (
        "Paths 'embedding' and 'head' lead to one layer, shared or tied, and rules 'embedding' (float16) and 'head' "
        "(bfloat16) differ; give both the same policy",
    )


def test_a_pattern_on_one_path_and_an_exact_key_on_the_other_must_agree() -> None:
    assert "lead to one layer" in _error(tied(), {"emb.*": "float16", "head": "bfloat16"}).findings[0]
    assert plan(tied(), {"emb.*": "bfloat16", "head": "bfloat16"})["head"].rule == "emb.*"


def test_keep_counts_where_a_tied_site_is_contradicted_and_errors_are_off() -> None:
    bound = plan(tied(), {"emb.*": "float16", "head": "keep"}, strict=False)
    assert (bound["embedding"].given, bound["embedding"].rule) == (keep, "head")
    assert len(bound.warnings) >= 1


def test_a_tied_weight_is_counted_once() -> None:
    assert plan(tied(), {}).totals.bytes_before == 100 * 32 * 4 + 100 * 4 + 64 * 32 * 4


def test_every_member_must_be_able_to_carry_a_mode() -> None:
    assert plan(tied(), "int8")["head"].status is Status.NOT_A_TARGET


# All of it


_KEYS = st.sampled_from([".*", "layer/.*", ".*query", ".*/0/.*", "head", "layer/1/query", "(head|embedding)", "x", ""])
_POLICIES = st.sampled_from(["int8", "bfloat16", "float32", "keep", "int8_from_mixed_bfloat16"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(_KEYS, _POLICIES, max_size=5), st.one_of(st.none(), _POLICIES))
def test_a_plan_agrees_with_the_map_it_was_made_of(rules: dict[str, str], default: str | None) -> None:
    policies = DTypePolicyMap(default, rules)
    bound = plan(encoder(2), policies, strict=False)
    assert [row.site for row in bound] == list(encoder(2))
    for row in bound:
        assert row.bytes_before == row.site.num_bytes
        if row.given is keep:
            assert row.bytes_after == row.bytes_before
        else:
            assert row.status in (Status.APPLIED, Status.FELL_BACK)
        try:
            rule = policies.rule_for(row.path)
        except PolicyError:
            continue
        assert row.rule == rule
        assert row.asked == (policies[row.path] if rule is not None or default is not None else None)


def test_binding_does_not_change_or_hold_the_authors_map() -> None:
    rules = DTypePolicyMap(None, {"head": "int8"})
    before = rules.get_config()
    bound = plan(encoder(), rules)
    assert rules.get_config() == before
    rules["embedding"] = "bfloat16"
    bound.policy["embedding"] = "float16"
    assert bound.policy == DTypePolicyMap(None, {"head": "int8"})


def test_equal_sorts_of_site_are_judged_once() -> None:
    carrier = FakeCarrier()
    bind(encoder(50), "int8", carrier)
    assert carrier.num_judged == 5  # embedding, query, small, norm, head; a container has nothing to judge


def test_a_thousand_sites_and_rules_are_bound_in_linear_work() -> None:
    # No clock: patterns tried are counted. Twice the sites may try at most twice as much, and each site few.
    from narrowcast.dtype_policies import pattern

    rules = DTypePolicyMap(None, {rf".*layer/{i}/query": "int8" for i in range(300)})
    counts = []
    original = pattern.Pattern._matches
    for num_layers in (300, 600):
        tried = 0

        def counting(self: pattern.Pattern, path: str) -> bool:
            nonlocal tried
            tried += 1
            return original(self, path)

        pattern.Pattern._matches = counting  # type: ignore[method-assign]
        try:
            plan(encoder(num_layers), rules)
        finally:
            pattern.Pattern._matches = original  # type: ignore[method-assign]
        counts.append(tried)
    assert counts[1] <= 2 * counts[0]
    assert counts[0] < 10 * len(encoder(300))


@pytest.mark.parametrize("name", ["policy.toml", "maps/policy.json", Path("policy.toml")], ids=str)
def test_the_name_of_a_policy_file_is_told_how_to_be_read(name: object) -> None:
    with pytest.raises(PolicyError, match=r"name of a file.*Read the file first: `narrowcast.read_policy\(path\)`"):
        as_map(name)
