"""Where narrowcast differs from Keras on purpose: one test for each row of docs/differences-from-keras.md.

Each test shows both sides, so that a row that Keras has caught up with is noticed.
"""

from __future__ import annotations

import copy
import re
import threading
from pathlib import Path

import numpy
import pytest
import torch

from narrowcast import config
from narrowcast import dtype_policies as ours
from tests.dtype_policies.outcomes import keras, outcome

theirs = keras.dtype_policies
TABLE = Path(__file__).parents[2] / "docs" / "differences-from-keras.md"


@pytest.fixture(autouse=True)
def _global_policies_restored():
    yield
    keras.config.set_dtype_policy("float32")
    config.set_dtype_policy("float32")


def raised(call) -> str | None:
    kind, what = outcome(call)
    return what if kind == "raised" else None


def test_each_row_of_the_table_has_one_test_and_each_test_one_row():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    prefix = "test_difference_"
    tests = [name.removeprefix(prefix).replace("_", "-") for name in globals() if name.startswith(prefix)]
    assert sorted(rows) == sorted(tests)
    assert len(set(rows)) == len(rows)


# Names and dtypes


def test_difference_storage_dtypes():  # P-09
    for name in ("int8", "float8_e4m3fn", "float8_e5m2"):
        assert raised(lambda name=name: theirs.get(name)) == "ValueError"
        assert ours.get(name).variable_dtype == name


def test_difference_more_dtypes():
    for name in ("float8_e4m3fnuz", "float6_e2m3fn", "float4_e2m1fn", "int4", "uint4", "int2", "complex32"):
        assert raised(lambda name=name: theirs.DTypePolicy(name)) == "ValueError"
        assert ours.DTypePolicy(name).compute_dtype == name


def test_difference_one_spelling():
    for name in ("int", "torch.float32", "a torch.int8"):
        assert raised(lambda name=name: theirs.DTypePolicy(name)) is None
        assert raised(lambda name=name: ours.DTypePolicy(name)) == "ValueError"


def test_difference_dtype_objects():  # P-13
    for dtype in (torch.bfloat16, numpy.float16, numpy.dtype("float64")):
        name = ours.get(dtype).name
        assert raised(lambda dtype=dtype: theirs.DTypePolicy(dtype)) == "TypeError"
        assert raised(lambda dtype=dtype: keras.config.set_dtype_policy(dtype)) == "ValueError"
        assert raised(lambda dtype=dtype: theirs.QuantizedDTypePolicy("int8", dtype)) == "TypeError"
        assert ours.DTypePolicy(dtype).name == name
        assert ours.QuantizedDTypePolicy("int8", dtype).source == ours.DTypePolicy(name)
        config.set_dtype_policy(dtype)
        assert config.dtype_policy().name == name


def test_difference_more_modes():
    for name in (
        "int8/weight_from_float32",
        "float8/current_from_float32",
        "mxfp4_from_float32",
        "nvfp4/weight_from_float32",
    ):
        assert raised(lambda name=name: theirs.get(name)) == "ValueError"
        assert ours.get(name).name == name


# Policies as values


def test_difference_hash():  # P-01
    assert raised(lambda: hash(theirs.get("float32"))) == "TypeError"
    assert {ours.get("int8_from_float32"): 1}[ours.QuantizedDTypePolicy("int8", "float32")] == 1


def test_difference_immutable():
    policy = theirs.get("float32")
    policy.anything = 1
    with pytest.raises(AttributeError, match="is a value"):
        ours.get("float32").anything = 1


def test_difference_repr_of_settings():  # P-05
    assert repr(theirs.QuantizedFloat8DTypePolicy("float8", "float32", 32)) == repr(theirs.get("float8_from_float32"))
    assert repr(ours.QuantizedFloat8DTypePolicy("float8", "float32", 32)) != repr(ours.get("float8_from_float32"))
    assert repr(ours.get("float8_from_float32")) == repr(theirs.get("float8_from_float32"))


def test_difference_mode_attribute():
    assert not hasattr(theirs.get("int8_from_float32"), "mode")
    for name in ("int4/128_from_float32", "gptq/4/128_from_float32", "awq/4/128_from_float32", "int8_from_float32"):
        mine = ours.get(name)
        assert mine.mode == mine.quantization_mode == getattr(theirs.get(name), "mode", mine.mode)


# Quantized policies


def test_difference_one_class_for_each_mode():  # P-04
    for class_name, mode in (
        ("QuantizedDTypePolicy", "float8"),
        ("QuantizedDTypePolicy", "gptq"),
        ("QuantizedDTypePolicy", "int4"),
        ("QuantizedFloat8DTypePolicy", "int8"),
        ("QuantizedFloat8DTypePolicy", "gptq"),
    ):
        assert raised(lambda c=class_name, m=mode: getattr(theirs, c)(m, "float32")) is None
        assert raised(lambda c=class_name, m=mode: getattr(ours, c)(m, "float32")) == "ValueError"


def test_difference_old_int4():  # P-08, H-01
    assert type(theirs.get("int4_from_float32")) is theirs.QuantizedDTypePolicy
    assert ours.get("int4_from_float32") == ours.Int4DTypePolicy("int4/-1", "float32")
    assert raised(lambda: theirs.get("int4/None_from_float32")) == "ValueError"
    assert ours.get("int4/None_from_float32") == ours.Int4DTypePolicy("int4/-1", "float32")


def test_difference_strict_numbers():  # P-07
    for mode in ("gptq/4/0128", "gptq/4/1_28", "gptq/4/ +128 ", "gptq/04/128"):
        assert raised(lambda mode=mode: theirs.GPTQDTypePolicy(mode, "float32")) is None
        assert raised(lambda mode=mode: ours.GPTQDTypePolicy(mode, "float32")) == "ValueError"


def test_difference_mode_that_is_not_text():
    for class_name in ("Int4DTypePolicy", "GPTQDTypePolicy", "AWQDTypePolicy"):
        assert raised(lambda c=class_name: getattr(theirs, c)(5, "float32")) == "AttributeError"
        assert raised(lambda c=class_name: getattr(ours, c)(5, "float32")) == "TypeError"
    assert raised(lambda: theirs.QuantizedDTypePolicy(5, "float32")) == "ValueError"
    assert raised(lambda: ours.QuantizedDTypePolicy(5, "float32")) == "TypeError"


def test_difference_source_not_given():  # P-06, H-07
    assert theirs.GPTQDTypePolicy("gptq/4/128").name == "gptq/4/128_from_None"
    assert ours.GPTQDTypePolicy("gptq/4/128").name == "gptq/4/128_from_float32"


def test_difference_float_sources():  # P-10
    for source in ("int32", "bool", "string", "complex64"):
        assert raised(lambda source=source: theirs.QuantizedDTypePolicy("int8", source)) is None
        assert raised(lambda source=source: ours.QuantizedDTypePolicy("int8", source)) == "ValueError"


def test_difference_int8_from_float16():  # P-11
    for source in ("float16", "mixed_float16"):
        assert raised(lambda source=source: theirs.QuantizedDTypePolicy("int8", source)) == "ValueError"
        assert ours.QuantizedDTypePolicy("int8", source).compute_dtype == "float16"


def test_difference_history_length():  # P-03
    for length in (True, False, 0, -5):
        policy = theirs.QuantizedFloat8DTypePolicy("float8", "float32", length)
        assert policy.amax_history_length is length
    assert raised(lambda: ours.QuantizedFloat8DTypePolicy("float8", "float32", True)) == "TypeError"
    assert raised(lambda: ours.QuantizedFloat8DTypePolicy("float8", "float32", 0)) == "ValueError"
    assert raised(lambda: ours.QuantizedFloat8DTypePolicy("float8", "float32", -5)) == "ValueError"
    sixteen = numpy.int64(16)
    assert raised(lambda: theirs.QuantizedFloat8DTypePolicy("float8", "float32", sixteen)) == "TypeError"
    assert type(ours.QuantizedFloat8DTypePolicy("float8", "float32", sixteen).amax_history_length) is int


def test_difference_seed_form_of_float8():
    for arguments in (
        ("mixed_bfloat16",),
        ("mixed_bfloat16", 16),
        ("float8_from_float32",),
        ("float8_from_float32", 16),
    ):
        assert raised(lambda a=arguments: theirs.QuantizedFloat8DTypePolicy(*a)) in ("ValueError", "TypeError")
        assert ours.QuantizedFloat8DTypePolicy(*arguments).quantization_mode == "float8"


def test_difference_settings_of_float8():
    settings = {"margin": 0, "amax_compute_algo": "max", "high_precision_weight_gradient": False}
    config = theirs.get("float8_from_float32").get_config()
    assert not set(settings) & set(config)
    assert ours.get("float8_from_float32").get_config() == config | settings


# Configs


def test_difference_serialized_form():  # P-14, H-05
    assert theirs.serialize(theirs.get("float32"))["class_name"] == "DTypePolicy"
    assert ours.serialize(ours.get("float32")) == "float32"
    assert "registered_name" in theirs.serialize(theirs.get("int8_from_float32"))
    assert sorted(ours.serialize(ours.get("int8_from_float32"))) == ["class_name", "config"]


def test_difference_only_policies_are_read():  # P-12
    dense = {"module": "keras.layers", "class_name": "Dense", "config": {"units": 3}, "registered_name": None}
    assert theirs.get(dense) == "Dense"
    assert raised(lambda: ours.get(dense)) == "ValueError"
    assert theirs.deserialize("float32") == "float32"
    assert ours.deserialize("float32") == ours.get("float32")


def test_difference_former_class_names():  # S-11, H-13
    written = {"class_name": "Policy", "config": {"name": "mixed_float16"}}
    assert theirs.deserialize(written) == "Policy"
    assert ours.deserialize(written) == ours.get("mixed_float16")


def test_difference_config_leaves_policies_alone():  # M-01
    policy = theirs.DTypePolicy("bfloat16")
    policies = theirs.DTypePolicyMap()
    policies["a"] = policy
    policies.get_config()
    assert policy.name is None
    policy = ours.DTypePolicy("bfloat16")
    policies = ours.DTypePolicyMap()
    policies["a"] = policy
    policies.get_config()
    assert policy.name == "bfloat16"
    assert policies["a"] is policy


def test_difference_rules_survive_a_config():  # M-02
    rules = {"a": "bfloat16", "b": "int8_from_mixed_bfloat16", "c": "gptq/4/128_from_float16"}

    def reread(library):
        policies = library.DTypePolicyMap(None, {key: library.get(name) for key, name in rules.items()})
        return {key: policy.name for key, policy in type(policies).from_config(policies.get_config()).items()}

    assert reread(theirs) == {"a": "float32", "b": "int8_from_float32", "c": "gptq/4/128_from_None"}
    assert reread(ours) == rules


def test_difference_map_config_is_json():
    default = {"default_policy": "float16"}
    assert isinstance(theirs.DTypePolicyMap(theirs.get("float16")).get_config()["default_policy"], theirs.DTypePolicy)
    assert ours.DTypePolicyMap(ours.get("float16")).get_config() == {**default, "policy_map": {}}


# The global policy


def test_difference_global_policy_of_the_process():  # G-01
    seen = []

    def look():
        seen.append((keras.config.dtype_policy().name, config.dtype_policy().name))

    keras.config.set_dtype_policy("mixed_bfloat16")
    config.set_dtype_policy("mixed_bfloat16")
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [("float32", "mixed_bfloat16")]


def test_difference_quantized_global_policy():  # G-06
    keras.config.set_dtype_policy("int8_from_mixed_bfloat16")
    config.set_dtype_policy("int8_from_mixed_bfloat16")
    assert raised(theirs.DTypePolicy) == "ValueError"
    assert raised(lambda: theirs.QuantizedDTypePolicy("int8")) == "ValueError"
    assert ours.DTypePolicy() == ours.get("mixed_bfloat16")
    assert ours.QuantizedDTypePolicy("int8") == ours.get("int8_from_mixed_bfloat16")


def test_difference_no_map_as_global_policy():  # M-13
    assert raised(lambda: keras.config.set_dtype_policy(theirs.DTypePolicyMap())) is None
    assert raised(lambda: config.set_dtype_policy(ours.DTypePolicyMap())) == "ValueError"


def test_difference_configs_as_global_policy():  # P-13
    written = {"class_name": "DTypePolicy", "config": {"name": "float16"}}
    assert raised(lambda: keras.config.set_dtype_policy(written)) == "ValueError"
    config.set_dtype_policy(written)
    assert config.dtype_policy() == ours.get("float16")


def test_difference_live_default_of_a_map():  # M-12
    maps = theirs.DTypePolicyMap(), ours.DTypePolicyMap()
    keras.config.set_dtype_policy("float16")
    config.set_dtype_policy("float16")
    assert [policies["a"].name for policies in maps] == ["float32", "float16"]


# Maps


def test_difference_modes_and_keep_in_maps():
    policies = theirs.DTypePolicyMap()
    for value in ("int8", "gptq/4/128", "keep"):
        assert raised(lambda value=value: policies.__setitem__("a", value)) == "ValueError"
    mine = ours.DTypePolicyMap(None, {"a": "int8", "b": "gptq/4/128", "c": "keep"})
    assert [policy.name for policy in mine.values()] == ["int8_from_keep", "gptq/4/128_from_keep", "keep"]


def test_difference_keep_beats_patterns():  # M-08
    rules = {"a/.*": "float16", ".*/norm": "float64"}
    policies = theirs.DTypePolicyMap(None, {key: theirs.get(name) for key, name in rules.items()})
    assert raised(lambda: policies["a/norm"]) == "ValueError"
    assert ours.DTypePolicyMap(None, {"a/.*": "float16", ".*/norm": "keep"})["a/norm"] is ours.keep
    assert raised(lambda: ours.DTypePolicyMap(None, rules)["a/norm"]) == "ValueError"


def test_difference_equal_policies_do_not_overlap():  # M-07
    def look(library):
        rules = {key: library.get("float16") for key in ("enc/.*", ".*/q")}
        return library.DTypePolicyMap(None, rules)["enc/q"].name

    assert raised(lambda: look(theirs)) == "ValueError"
    assert look(ours) == "float16"


def test_difference_checked_rules():  # M-04
    for rules in ({"a": "flot32"}, {"a": 5}):
        assert raised(lambda rules=rules: theirs.DTypePolicyMap(None, rules)) is None
        assert raised(lambda rules=rules: ours.DTypePolicyMap(None, rules)) == "ValueError"
    assert theirs.DTypePolicyMap(None, {"a": "float16"})["a"] == "float16"
    assert ours.DTypePolicyMap(None, {"a": "float16"})["a"] == ours.get("float16")


def test_difference_copied_rules():  # M-04
    for library, length in ((theirs, 2), (ours, 1)):
        rules = {"a": library.get("float16")}
        policies = library.DTypePolicyMap(None, rules)
        rules["b"] = "junk"
        assert len(policies) == length
    shallow = theirs.DTypePolicyMap("float32", {"a": theirs.get("float16")})
    copy.copy(shallow).clear()
    assert len(shallow) == 0
    mine = ours.DTypePolicyMap("float32", {"a": "float16"})
    copy.copy(mine).clear()
    assert len(mine) == 1


def test_difference_keys_are_text():  # M-04
    for key in (5, None, ("a",)):
        assert raised(lambda key=key: theirs.DTypePolicyMap().__setitem__(key, "float16")) is None
        assert raised(lambda key=key: ours.DTypePolicyMap().__setitem__(key, "float16")) == "TypeError"
        assert raised(lambda key=key: theirs.DTypePolicyMap()[key]) is None
        assert raised(lambda key=key: ours.DTypePolicyMap()[key]) == "TypeError"


def test_difference_bad_patterns():
    policies = theirs.DTypePolicyMap()
    policies["enc/(.*"] = "float16"
    with pytest.raises(re.error):
        policies["a"]
    assert raised(lambda: ours.DTypePolicyMap(None, {"enc/(.*": "float16"})) == "ValueError"


def test_difference_lengths():
    def look(library, key, path):
        policies = library.DTypePolicyMap("float32")
        policies[key] = "float16"
        return policies[path].name

    assert look(theirs, "a" * 2000, "a") == look(theirs, "a", "a" * 2000) == "float32"
    assert raised(lambda: look(ours, "a" * 2000, "a")) == "ValueError"
    assert raised(lambda: look(ours, "a", "a" * 2000)) == "ValueError"


def test_difference_no_maps_in_maps():  # M-04, M-16
    policies = theirs.DTypePolicyMap()
    policies["a"] = theirs.DTypePolicyMap()
    assert isinstance(policies["a"], theirs.DTypePolicyMap)
    assert raised(lambda: ours.DTypePolicyMap().__setitem__("a", ours.DTypePolicyMap())) == "ValueError"


def test_difference_get_default():  # M-06
    other = object()
    assert theirs.DTypePolicyMap("float32").get("a", other) == theirs.get("float32")
    assert ours.DTypePolicyMap("float32").get("a", other) is other
    assert ours.DTypePolicyMap("float32").get("a") is None


def test_difference_setdefault():  # M-06
    policies = theirs.DTypePolicyMap("float32")
    assert policies.setdefault("a", "float16") == theirs.get("float32")
    assert "a" not in policies
    policies = ours.DTypePolicyMap("float32")
    assert policies.setdefault("a", "float16") == policies.setdefault("a", "float64") == policies["a"]
    assert policies["a"] == ours.get("float16")


def test_difference_pop_default():  # M-06
    assert raised(lambda: theirs.DTypePolicyMap().pop("a", None)) == "KeyError"
    assert ours.DTypePolicyMap().pop("a", None) is None


def test_difference_update_is_all_or_nothing():
    new = [("a", "float16"), ("b", "flot32")]
    for library, length in ((theirs, 1), (ours, 0)):
        policies = library.DTypePolicyMap()
        assert raised(lambda policies=policies: policies.update(new)) == "ValueError"
        assert len(policies) == length


def test_difference_maps_compare():  # M-03
    assert raised(lambda: theirs.DTypePolicyMap() == theirs.DTypePolicyMap()) == "AttributeError"
    assert ours.DTypePolicyMap("float32", {"a": "int8"}) == ours.DTypePolicyMap("float32", {"a": "int8"})
    assert ours.DTypePolicyMap("float32", {"a": "int8"}) != ours.DTypePolicyMap("float32", {"a": "int8/weight"})


def test_difference_maps_are_true():  # M-11
    assert not theirs.DTypePolicyMap("float64")
    assert ours.DTypePolicyMap("float64")


def test_difference_repr_of_a_map():
    assert re.match(
        r"<DTypePolicyMap at 0x[0-9a-f]+ default_policy=float32, mapping=\[\]>", repr(theirs.DTypePolicyMap())
    )
    mine = ours.DTypePolicyMap("float32", {"a": "float16"})
    assert (
        repr(mine)
        == """<DTypePolicyMap default_policy=<DTypePolicy "float32">, policy_map={'a': <DTypePolicy "float16">}>"""
    )


def test_difference_changing_while_iterating():
    def add_below(library):
        policies = library.DTypePolicyMap("float32", {"a": library.get("float16")})
        for key in policies:
            policies[key + "/b"] = "float16"
        return list(policies)

    with pytest.raises(RuntimeError, match="changed size"):
        add_below(theirs)
    assert add_below(ours) == ["a", "a/b"]


# convert_input


def test_difference_arrays_stay_their_own_kind():
    x = numpy.ones(2, "float32")
    assert isinstance(theirs.DTypePolicy("float16").convert_input(x, True, "float16"), torch.Tensor)
    mine = ours.DTypePolicy("float16").convert_input(x, True, "float16")
    assert (type(mine), mine.dtype) == (numpy.ndarray, numpy.float16)


def test_difference_floats_never_become_integers():
    x = torch.tensor([1.7])
    assert theirs.DTypePolicy("int32").convert_input(x, True, "int32").tolist() == [1]
    assert ours.DTypePolicy("int32").convert_input(x, True, "int32") is x


def test_difference_containers():
    x = {"a": torch.ones(1)}
    assert theirs.DTypePolicy("float16").convert_input(x, True, "float16") is x
    assert ours.DTypePolicy("float16").convert_input(x, True, "float16")["a"].dtype == torch.float16


def test_difference_dtype_not_given():
    x = torch.ones(1, dtype=torch.float16)
    assert theirs.DTypePolicy("float16").convert_input(x, True, None).dtype == torch.float32
    assert raised(lambda: ours.DTypePolicy("float16").convert_input(x, True, None)) == "ValueError"
