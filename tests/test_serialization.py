"""Objects as plain JSON values and back, by names that are registered here and by nothing else."""

from __future__ import annotations

import json
import threading

import numpy
import pytest
import torch

from narrowcast import dtype_policies, saving
from narrowcast.errors import ConfigError
from narrowcast.serialization import sharing


class Box:
    def __init__(self, value=None):
        self.value = value

    def get_config(self):
        return {"value": self.value}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@saving.register_keras_serializable("tests")
def triple(x):
    return 3 * x


def round_trip(obj, **kwargs):
    return saving.deserialize(json.loads(json.dumps(saving.serialize(obj))), **kwargs)


def test_a_registered_class_is_known_by_package_and_name():
    registered = saving.register_serializable("tests", name="Crate")(type("Crate", (Box,), {}))
    assert saving.get_registered_name(registered) == "tests>Crate"
    assert saving.get_registered_object("tests>Crate") is registered
    assert type(round_trip(registered(1))) is registered


def test_a_class_that_is_not_registered_goes_by_its_own_name():
    assert saving.get_registered_name(Box) == "Box"
    assert saving.get_registered_object("Box") is None


def test_a_registered_function_comes_back():
    assert round_trip({"f": triple})["f"] is triple


def test_the_plain_name_of_the_decorator_is_the_same():
    assert saving.register_keras_serializable is saving.register_serializable


def test_the_same_class_defined_again_takes_its_own_place():
    first = saving.register_serializable("tests")(type("Again", (Box,), {"__qualname__": "Again"}))
    second = saving.register_serializable("tests")(type("Again", (Box,), {"__qualname__": "Again"}))
    assert first is not second
    assert saving.get_registered_object("tests>Again") is second


def test_another_class_under_a_name_that_is_taken_is_refused():
    saving.register_serializable("tests", name="Taken")(type("One", (Box,), {}))
    with pytest.raises(ConfigError, match="Name 'tests>Taken' is registered already"):
        saving.register_serializable("tests", name="Taken")(type("Two", (Box,), {}))


def test_a_class_without_a_config_is_refused():
    with pytest.raises(ConfigError, match="Class Bare has no `get_config` method"):
        saving.register_serializable("tests")(type("Bare", (), {}))


def test_the_decorator_without_parentheses_says_how_to_write_it():
    with pytest.raises(ConfigError, match=r"Write `@register_serializable\(\)`"):
        saving.register_serializable(Box)


def test_an_unknown_class_is_told_with_what_to_do():
    with pytest.raises(ConfigError, match="Class 'Box' of a config is unknown") as caught:
        saving.deserialize(saving.serialize(Box(1)))
    assert "give it in `custom_objects`" in str(caught.value)


def test_custom_objects_are_given_by_argument():
    assert saving.deserialize(saving.serialize(Box(1)), {"Box": Box}).value == 1


def test_custom_objects_are_given_by_scope():
    with saving.custom_object_scope({"Box": Box}):
        assert round_trip(Box(1)).value == 1
    with pytest.raises(ConfigError):
        round_trip(Box(1))


def test_scopes_nest_and_the_same_scope_can_be_entered_again():
    scope, other = saving.CustomObjectScope({"Box": Box}), type("Other", (Box,), {})
    with scope, saving.CustomObjectScope({"Other": other}), scope:
        assert saving.get_registered_object("Box") is Box
        assert saving.get_registered_object("Other") is other
    assert saving.get_registered_object("Box") is None


def test_a_scope_ends_with_an_error():
    with pytest.raises(RuntimeError), saving.CustomObjectScope({"Box": Box}):
        raise RuntimeError
    assert saving.get_registered_object("Box") is None


def test_a_scope_is_seen_by_its_own_thread_only():
    found = []
    with saving.CustomObjectScope({"Box": Box}):
        thread = threading.Thread(target=lambda: found.append(saving.get_registered_object("Box")))
        thread.start()
        thread.join()
    assert found == [None]


def test_what_is_put_into_the_table_of_custom_objects_is_registered():
    saving.get_custom_objects()["by hand"] = Box
    assert saving.get_registered_object("by hand") is Box
    del saving.get_custom_objects()["by hand"]


def test_an_argument_wins_over_what_is_registered():
    assert saving.get_registered_object("tests>triple", {"tests>triple": Box}) is Box


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", [1, [2]], {"a": {"b": None}}])
def test_plain_values_come_back(value):
    assert round_trip(value) == value


def test_tuples_come_back_as_lists():
    assert round_trip((1, (2, 3))) == [1, [2, 3]]


def test_policies_of_every_class_come_back():
    policies = [dtype_policies.get(name) for name in ("float32", "int8_from_mixed_bfloat16", "gptq/4/128_from_float32")]
    policies.append(dtype_policies.DTypePolicyMap("float32", {"a": "bfloat16"}))
    assert [dtype_policies.get(policy) for policy in round_trip(policies)] == policies


def test_dtypes_and_numbers_of_other_libraries_are_written_plainly():
    assert saving.serialize([torch.bfloat16, numpy.float32(2), torch.tensor(3)]) == ["bfloat16", 2.0, 3]


def test_objects_within_objects_come_back():
    again = round_trip(Box(Box([Box(1)])), custom_objects={"Box": Box})
    assert again.value.value[0].value == 1


def test_one_object_in_two_places_stays_one():
    shared = Box(1)
    with sharing():
        config = saving.serialize([shared, Box(shared)])
    with sharing():
        first, second = saving.deserialize(config, {"Box": Box})
    assert second.value is first


def test_a_config_is_not_changed_by_reading_it():
    config = saving.serialize(Box(Box(1)))
    before = json.dumps(config)
    saving.deserialize(config, {"Box": Box})
    saving.deserialize(config, {"Box": Box})
    assert json.dumps(config) == before


def test_what_is_an_object_already_is_passed_on():
    box = Box(1)
    assert saving.deserialize({"a": box})["a"] is box


@pytest.mark.parametrize("obj", [numpy.ones(2), torch.ones(2)])
def test_an_array_is_no_part_of_a_config(obj):
    with pytest.raises(ConfigError, match="which holds no weights"):
        saving.serialize(obj)


def test_an_object_without_a_config_is_an_error():
    with pytest.raises(ConfigError, match="Object cannot be written as JSON"):
        saving.serialize(object())


def test_a_lambda_is_an_error_that_says_why():
    with pytest.raises(ConfigError, match="a lambda has none"):
        saving.serialize(lambda x: x)


def test_a_function_that_is_not_registered_is_an_error():
    def own(x):
        return x

    with pytest.raises(ConfigError, match="Decorate it with"):
        saving.serialize(own)


def test_keys_that_are_no_text_are_an_error():
    with pytest.raises(ConfigError, match="Key in a config is not text"):
        saving.serialize({1: 2})


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"class_name": "os.system", "config": {"command": "true"}}, "is unknown"),
        ({"class_name": "Dense", "module": "os", "config": {}, "registered_name": "os>system"}, "is unknown"),
        ({"class_name": "function", "config": "eval"}, "Function 'eval' of a config is unknown"),
        ({"class_name": ["a"], "config": {}}, "is unknown"),
        ({"class_name": "Zeros", "config": []}, "Config of 'Zeros' is not a table"),
        ({"class_name": "Zeros", "config": {"surprise": 1}}, "Config does not fit 'Zeros'"),
        ({"class_name": "triple", "config": {}}, "is unknown"),
    ],
)
def test_a_config_that_was_edited_by_hand_is_an_error(config, problem):
    import narrowcast.torch.layers  # noqa: F401  makes its classes known

    with pytest.raises(ConfigError, match=problem):
        saving.deserialize(config)


def test_a_config_names_no_module_to_import():
    config = {"class_name": "Popen", "module": "subprocess", "config": {"args": ["true"]}, "registered_name": None}
    with pytest.raises(ConfigError, match="Class 'Popen' of a config is unknown"):
        saving.deserialize(config)


def test_a_config_of_absurd_depth_is_an_error():
    config = 1
    for _ in range(100_000):
        config = [config]
    with pytest.raises(ConfigError, match="nested too deeply"):
        saving.deserialize(config)
