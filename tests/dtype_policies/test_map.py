"""`DTypePolicyMap`: looking up, keys, and a map as a value."""

from __future__ import annotations

import re
import threading
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.dtype_policies import (
    DTypePolicyMap,
    Match,
    asked,
    get,
    keep,
    policy_scope,
)
from narrowcast.dtype_policies.pattern import MAX_KEY_LENGTH, MAX_PATH_LENGTH, Pattern
from narrowcast.errors import (
    DuplicateRuleError,
    MissingRuleError,
    OverlapError,
    PatternError,
    PolicyError,
    PolicyTypeError,
)

FLOAT16, BFLOAT16, FLOAT32 = get("float16"), get("bfloat16"), get("float32")


def example() -> DTypePolicyMap:
    return DTypePolicyMap(
        "float32", {"encoder/layer_0/dense": "bfloat16", "encoder/.*": "float16", "decoder": "bfloat16"}
    )


# Looking up


def test_exact_key_wins_over_pattern():
    assert example()["encoder/layer_0/dense"] == BFLOAT16


def test_pattern_matches_the_whole_path():  # M-09, H-02
    policies = DTypePolicyMap("float32", {"encoder": "float16"})
    for path in ("encoder/dense", "my/encoder", "encoder2", "my/encoder2"):
        assert policies[path] == FLOAT32


def test_path_that_matches_nothing_gets_the_default():
    assert example()["decoder/attention"] == FLOAT32


def test_path_that_matches_nothing_gets_the_global_policy_of_the_moment():  # M-12
    policies = DTypePolicyMap()
    assert policies["a"] == FLOAT32
    with policy_scope("mixed_float16"):
        assert policies["a"] == get("mixed_float16")
        assert policies.default_policy == get("mixed_float16")
    assert policies["a"] == FLOAT32


def test_two_patterns_with_different_policies_are_an_error_that_names_them():
    policies = example()
    policies["encoder/attention/.*"] = "bfloat16"
    with pytest.raises(
        OverlapError, match=r"^Path 'encoder/attention/query' matches multiple dtype policy keys"
    ) as caught:
        policies["encoder/attention/query"]
    assert caught.value.got["rules"] == {"encoder/.*": FLOAT16, "encoder/attention/.*": BFLOAT16}
    assert isinstance(caught.value, ValueError)


def test_two_patterns_with_one_policy_are_no_error():  # M-07
    policies = DTypePolicyMap(None, {"enc/.*": "float16", ".*/q": FLOAT16})
    assert policies["enc/q"] == FLOAT16
    assert policies.rule_for("enc/q") == "enc/.*"


@pytest.mark.parametrize("rules", [{"a/.*": "int8", ".*/norm": "keep"}, {".*/norm": "keep", "a/.*": "int8"}], ids=str)
def test_keep_pattern_beats_every_other_pattern(rules):  # M-08
    policies = DTypePolicyMap("float32", rules)
    assert policies["a/norm"] is keep
    assert policies["a/dense"] == asked("int8")


def test_keep_pattern_settles_what_would_overlap():
    policies = DTypePolicyMap(None, {"a/.*": "int8", ".*/q": "float16", "a/q": "keep"})
    assert policies["a/q"] is keep
    policies = DTypePolicyMap(None, {"a/.*": "int8", ".*/q": "float16", "./q": "keep"})
    assert policies["a/q"] is keep


def test_exact_key_beats_a_keep_pattern():
    assert DTypePolicyMap(None, {".*": "keep", "a/q": "int8"})["a/q"] == asked("int8")


def test_match_tells_exact_key_and_patterns_apart():
    policies = DTypePolicyMap(None, {"a/b": "int8", "a/.*": "keep", "b": "float16", ".*b": "float32"})
    assert policies.match("a/b") == Match("a/b", ("a/.*", ".*b"))
    assert policies.match("c") == Match(None, ())


def test_rule_for_says_which_key_won():
    policies = example()
    assert policies.rule_for("encoder/layer_0/dense") == "encoder/layer_0/dense"
    assert policies.rule_for("encoder/x") == "encoder/.*"
    assert policies.rule_for("x") is None


def test_get_returns_its_default_where_nothing_matches():  # M-06
    policies = example()
    assert policies.get("encoder/x") == FLOAT16
    assert policies.get("x") is None
    assert policies.get("x", "other") == "other"


def test_root_has_the_empty_path():
    policies = DTypePolicyMap("float32", {"": "float16"})
    assert policies[""] == FLOAT16
    assert policies["a"] == FLOAT32


def test_key_with_special_characters_is_found_as_a_path():
    assert DTypePolicyMap("float32", {"a(b)/c+": "float16"})["a(b)/c+"] == FLOAT16


PARTS = st.sampled_from(["a", "b", "encoder", "layer", "0", "12"])
LOOKED_UP = st.lists(PARTS, max_size=4).map("/".join)


def _is_accepted(key):
    try:
        Pattern(key)
    except PatternError:  # several `.*` could take too long
        return False
    return True


RULE_KEYS = (
    st.lists(PARTS | st.sampled_from([".*", "[^/]+", r"\d+", "(a|b)", "."]), max_size=4)
    .map("/".join)
    .filter(_is_accepted)
)


@settings(max_examples=300, deadline=None)
@given(
    rules=st.dictionaries(RULE_KEYS, st.sampled_from(["keep", "int8", "float16"]), max_size=6),
    paths=st.lists(LOOKED_UP, min_size=1, max_size=5),
)
def test_look_up_is_that_of_the_rules_read_one_by_one(rules, paths):
    policies = DTypePolicyMap("float32", rules)
    for path in paths:
        patterns = [key for key in rules if key != path and re.fullmatch(key, path)]
        values = {rules[key] for key in patterns}
        assert policies.match(path) == Match(path if path in rules else None, tuple(patterns))
        if path in rules:
            assert policies[path] == asked(rules[path])
        elif "keep" in values:
            assert policies[path] is keep
        elif len(values) > 1:
            with pytest.raises(OverlapError):
                policies[path]
        else:
            assert policies[path] == (asked(values.pop()) if values else FLOAT32)


def test_look_up_follows_every_change():
    policies = DTypePolicyMap("float32")
    assert policies["a/b"] == FLOAT32
    policies["a/.*"] = "float16"
    assert policies["a/b"] == FLOAT16
    policies.replace("a/.*", "bfloat16")
    assert policies["a/b"] == BFLOAT16
    del policies["a/.*"]
    assert policies["a/b"] == FLOAT32
    policies["a/.*"] = "float16"
    policies.clear()
    assert policies["a/b"] == FLOAT32


@pytest.mark.parametrize("path", [5, None, b"a", ("a",)], ids=repr)
@pytest.mark.parametrize("look_up", [DTypePolicyMap.__getitem__, DTypePolicyMap.get, DTypePolicyMap.match])
def test_path_is_text(look_up, path):
    with pytest.raises(PolicyTypeError, match="Path is not text"):
        look_up(example(), path)


def test_path_has_a_longest_length():
    policies = DTypePolicyMap("float32", {"a": "float16"})
    assert policies["a" * MAX_PATH_LENGTH] == FLOAT32
    with pytest.raises(PolicyError, match="Path is too long"):
        policies["a" * (MAX_PATH_LENGTH + 1)]


# Keys and values


def test_assigning_an_existing_key_is_an_error():
    policies = example()
    with pytest.raises(DuplicateRuleError, match=r"Key 'decoder' is in the map already.*Use `replace`"):
        policies["decoder"] = "float16"
    assert policies["decoder"] == BFLOAT16


def test_replace_gives_a_key_another_policy_in_its_place():  # M-10
    policies = example()
    policies.replace("encoder/.*", "keep")
    assert list(policies) == list(example())
    assert policies["encoder/x"] is keep


def test_replace_of_a_key_that_is_not_there_suggests_the_nearest():
    with pytest.raises(MissingRuleError, match=r"did you mean 'decoder'\?"):
        example().replace("decodre", "float16")


def test_in_len_and_iteration_speak_of_keys():
    policies = example()
    assert ("encoder/.*" in policies, "encoder/x" in policies, 5 in policies) == (True, False, False)
    assert len(policies) == 3
    assert list(policies) == ["encoder/layer_0/dense", "encoder/.*", "decoder"]
    assert list(policies.items())[1] == ("encoder/.*", FLOAT16)
    assert list(policies.values()) == [BFLOAT16, FLOAT16, BFLOAT16]


def test_del_speaks_of_keys():
    policies = example()
    with pytest.raises(KeyError):
        del policies["encoder/x"]
    del policies["encoder/.*"]
    assert policies["encoder/x"] == FLOAT32


def test_pop_speaks_of_keys():  # M-06
    policies = example()
    assert policies.pop("decoder") == BFLOAT16
    assert policies.pop("decoder", None) is None
    with pytest.raises(KeyError, match="decoder"):
        policies.pop("decoder")


def test_popitem_empties_the_map_and_then_raises():
    policies = example()
    assert [policies.popitem()[0] for _ in range(3)] == list(example())
    with pytest.raises(KeyError):
        policies.popitem()


def test_setdefault_stores_and_returns():  # M-06
    policies = example()
    assert policies.setdefault("new", "float16") == FLOAT16
    assert policies.setdefault("new", "float64") == FLOAT16
    assert policies.setdefault("encoder/x", "float64") == get("float64")


@pytest.mark.parametrize(
    "value, name",
    [
        ("float16", "float16"),
        (FLOAT16, "float16"),
        ("int8", "int8_from_keep"),
        ("gptq/4/128", "gptq/4/128_from_keep"),
        ("int8_from_float32", "int8_from_float32"),
        ("keep", "keep"),
        ({"class_name": "DTypePolicy", "config": {"name": "float16"}}, "float16"),
        (float, "float32"),
        (None, "float32"),
    ],
    ids=repr,
)
def test_value_is_read_the_same_everywhere(value, name):  # M-04, P-13
    maps = [
        DTypePolicyMap(None, {"a": value}),
        DTypePolicyMap(),
        DTypePolicyMap(),
        DTypePolicyMap(None, {"a": "float64"}),
    ]
    maps[1]["a"] = value
    maps[2].update(a=value)
    maps[3].replace("a", value)
    assert {policies["a"].name for policies in maps} == {name}


@pytest.mark.parametrize("value", ["flot32", 5, [], {}, "int4", {"class_name": "Dense", "config": {}}], ids=repr)
def test_value_that_is_no_policy_is_refused_with_its_key(value):  # M-04, P-12
    with pytest.raises(PolicyError, match="Policy of rule 'a' cannot be read: "):
        DTypePolicyMap(None, {"a": value})


def test_error_of_a_value_keeps_its_suggestion():
    with pytest.raises(PolicyError, match="did you mean 'float32'") as caught:
        DTypePolicyMap("flaot32")
    assert caught.value.problem == "Policy of default policy cannot be read: Policy is unknown"


@pytest.mark.parametrize("key", [5, None, b"a", ("a",), re.compile("a")], ids=repr)
def test_key_is_text(key):  # M-04
    with pytest.raises(PolicyTypeError, match="Key is not text"):
        DTypePolicyMap(None, {key: "float16"})


@pytest.mark.parametrize("key", ["encoder/(", "[a", "*", "(?P<a>x)(?P<a>y)", "a" * (MAX_KEY_LENGTH + 1)])
def test_bad_pattern_is_refused_when_inserted(key):
    policies = example()
    with pytest.raises(PatternError):
        policies[key] = "float16"
    assert policies == example()


@pytest.mark.parametrize("rules", [[("a", "float16")], "a", 5, MappingProxyType({})], ids=repr)
def test_rules_are_a_dict(rules):
    with pytest.raises(PolicyTypeError, match="Rules of a map are not a dict"):
        DTypePolicyMap(None, rules)


def test_map_in_a_map_is_refused():  # M-04, M-13, M-16
    with pytest.raises(PolicyError, match="Policy of rule 'a' is itself a map"):
        DTypePolicyMap(None, {"a": DTypePolicyMap()})
    with pytest.raises(PolicyError, match="Policy of default policy is itself a map"):
        DTypePolicyMap(DTypePolicyMap())


def test_dict_given_is_copied():  # M-04
    rules = {"a": "float16"}
    policies = DTypePolicyMap(None, rules)
    rules["b"] = "junk"
    assert list(policies) == ["a"]
    policies["c"] = "float16"
    assert rules == {"a": "float16", "b": "junk"}


@pytest.mark.parametrize(
    "new",
    [
        {"x": "float16", "y": "flot32"},
        {"x": "float16", "(": "float16"},
        {"x": "float16", "decoder": "float16"},
        [("x", "float16"), ("x", "float16")],
        [("x", "float16"), (5, "float16")],
        [("x", "float16"), "no pair"],
    ],
    ids=repr,
)
def test_update_is_all_or_nothing(new):
    policies = example()
    with pytest.raises((ValueError, TypeError)):
        policies.update(new)
    assert policies == example()


def test_update_takes_mappings_pairs_maps_and_keywords():
    policies = DTypePolicyMap()
    policies.update({"a": "float16"})
    policies.update([("b", "float16")], c="float16")
    policies.update(DTypePolicyMap(None, {"d": "float16"}, optional=["d"]))
    assert list(policies) == ["a", "b", "c", "d"]
    assert policies.optional == {"d"}


# Keys that may match nothing


def test_optional_keys_are_marked():
    policies = DTypePolicyMap(None, {"a": "int8", "b": "keep"}, optional=["b"])
    assert policies.optional == {"b"}
    policies.mark_optional("a")
    assert policies.optional == {"a", "b"}


def test_key_that_is_deleted_is_no_longer_optional():
    policies = DTypePolicyMap(None, {"a": "int8"}, optional=["a"])
    del policies["a"]
    policies["a"] = "int8"
    assert policies.optional == frozenset()


def test_only_keys_of_the_map_are_optional():
    with pytest.raises(MissingRuleError, match=r"Key is not in the map. Got key='b'"):
        DTypePolicyMap(None, {"a": "int8"}, optional=["b"])


# Threads


def test_look_ups_and_changes_in_threads_do_not_disturb_each_other():
    policies = DTypePolicyMap("float32", {f"a/{number}/.*": "float16" for number in range(50)})
    failures = []

    def look_up():
        try:
            for number in range(400):
                assert policies[f"a/{number % 50}/x"] == FLOAT16
                assert policies[f"b/{number}"] in (FLOAT32, BFLOAT16)
        except BaseException as error:
            failures.append(error)

    def change():
        try:
            for number in range(400):
                policies[f"b/{number}"] = "bfloat16"
                del policies[f"b/{number}"]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=target) for target in (look_up, look_up, change)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(policies) == 50


def test_deleting_during_iteration_is_safe():
    policies = example()
    for key in policies:
        del policies[key]
    assert len(policies) == 0
