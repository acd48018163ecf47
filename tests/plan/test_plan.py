"""Plans as values: equal, hashable, pickled, in JSON and back, in sum."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.dtype_policies import DTypePolicyMap, get
from narrowcast.errors import PathError
from narrowcast.plan import Left, Plan, Share, Status
from tests.plan.models import encoder, plan, tied

RULES = {r"layer/\d+/.*": "int8", "layer/0/query": "bfloat16", "head": "keep"}


def _through_json(bound: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(bound.to_json(), allow_nan=False)))


def test_plans_of_equal_trees_and_maps_are_equal_and_hash_alike() -> None:
    first, second = plan(encoder(), RULES), plan(encoder(), RULES)
    assert first == second
    assert hash(first) == hash(second)
    assert first != plan(encoder(), {"head": "int8"})
    assert first != plan(encoder(4), RULES)


def test_plans_that_do_the_same_by_another_map_differ() -> None:
    assert plan(encoder(), {"head": "int8"}) != plan(encoder(), {"hea.": "int8"})


def test_a_plan_cannot_be_changed() -> None:
    bound = plan(encoder(), RULES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.rows = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound["head"].reason = "mine"  # type: ignore[misc]


def test_a_plan_survives_pickle_and_copies_of_it_are_itself() -> None:
    bound = plan(encoder(), RULES)
    assert bound.totals
    assert pickle.loads(pickle.dumps(bound)) == bound
    assert copy.deepcopy(bound) is bound
    assert copy.copy(bound) is bound


@pytest.mark.parametrize(
    "bound",
    [
        plan(encoder(), RULES),
        plan(encoder(), "int8"),
        plan(encoder(policy=get("int8_from_float32")), {}),
        plan(encoder(), DTypePolicyMap("mixed_bfloat16", {"layer/.*": "keep"})),
        plan(tied(), {"embedding": "float16"}),
        plan(encoder(), {".*query": "int8", "layer/.*": "bfloat16", "no": "keep"}, strict=False),
    ],
)
def test_a_plan_goes_through_json_and_back_unchanged(bound: Plan) -> None:
    assert _through_json(bound) == bound
    assert _through_json(bound).to_json() == bound.to_json()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from([".*", "layer/.*", ".*query", "head", "embedding"]),
        st.sampled_from(["int8", "bfloat16", "keep", "int8_from_mixed_bfloat16"]),
    ),
    st.integers(0, 3),
)
def test_any_plan_goes_through_json_and_back(rules: dict[str, str], num_layers: int) -> None:
    bound = plan(encoder(num_layers), rules, strict=False)
    assert _through_json(bound) == bound


def test_the_json_is_the_same_each_time() -> None:
    assert json.dumps(plan(encoder(), RULES).to_json()) == json.dumps(plan(encoder(), RULES).to_json())


def test_json_whose_rows_are_not_those_of_its_tree_is_refused() -> None:
    data = plan(encoder(), RULES).to_json()
    data["rows"].pop()
    with pytest.raises(ValueError, match="the rows of the plan are not those of its tree"):
        Plan.from_json(data)


def test_json_whose_map_is_one_policy_is_refused() -> None:
    data = plan(encoder(), RULES).to_json() | {"map": "bfloat16"}
    with pytest.raises(ValueError, match="the map of the plan is not a map"):
        Plan.from_json(data)


def test_rows_are_found_by_any_path() -> None:
    bound = plan(tied(), {})
    assert bound["head"] is bound["embedding"]
    assert "head" in bound
    assert "nose" not in bound
    assert len(bound) == len(list(bound)) == 3


def test_an_absent_path_is_an_error_with_the_nearest() -> None:
    with pytest.raises(PathError, match="did you mean 'layer/0/query'") as caught:
        plan(encoder(), {})["layer/0/qery"]
    assert isinstance(caught.value, KeyError)


def test_totals_are_in_bytes_by_form() -> None:
    totals = plan(encoder(2), {"layer/.*": "int8", "head": "bfloat16"}).totals
    # embedding and head 100 x 32, query 64 x 32, small 4 x 32, norm 32 values, 4 bytes each; int8 a quarter of that.
    assert (totals.bytes_before, totals.bytes_after, totals.bytes_kernel) == (43264, 30976, 32)
    assert totals.before == (Share("float32", 8, 43264),)
    assert totals.after == (
        Share("float32", 5, 14080),
        Share("bfloat16", 1, 12800),
        Share("int8_from_float32", 2, 4096),
    )


def test_totals_say_what_was_left_and_why() -> None:
    assert plan(encoder(2), {"layer/.*": "int8", "head": "keep"}).totals.left == (
        Left("no rule names it", Status.KEPT, 1, 12800),
        Left("keep", Status.KEPT, 1, 12800),
        Left("fewer than 8 outputs", Status.FELL_BACK, 2, 1024),
        Left("int8 does not exist for ('norm',)", Status.NOT_A_TARGET, 2, 256),
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from(["int8", "bfloat16", {"layer/.*": "int8"}, {".*": "keep"}]), st.integers(1, 4))
def test_shares_add_up_to_the_totals(policy: object, num_layers: int) -> None:
    totals = plan(encoder(num_layers), policy).totals
    assert sum(share.num_bytes for share in totals.before) == totals.bytes_before
    assert sum(share.num_bytes for share in totals.after) == totals.bytes_after
