"""The float8 policy: its two forms and its settings."""

from __future__ import annotations

import numpy
import pytest
import torch

from narrowcast.dtype_policies import QuantizedFloat8DTypePolicy, get, policy_scope, serialize
from narrowcast.errors import PolicyError, PolicyTypeError

EXPECTED = QuantizedFloat8DTypePolicy(mode="float8", source_name="mixed_bfloat16", amax_history_length=16)


@pytest.mark.parametrize(
    "arguments, keywords",
    [
        (("float8_from_mixed_bfloat16", 16), {}),
        (("mixed_bfloat16", 16), {}),
        (("mixed_bfloat16",), {"amax_history_length": 16}),
        ((), {"name": "mixed_bfloat16", "amax_history_length": 16}),
        ((), {"name": "float8_from_mixed_bfloat16", "amax_history_length": 16}),
        (("float8", "mixed_bfloat16", 16), {}),
        (("float8", "mixed_bfloat16"), {"amax_history_length": 16}),
        (("float8",), {"source_name": "mixed_bfloat16", "amax_history_length": numpy.int64(16)}),
        ((), {"mode": "float8", "source_name": "mixed_bfloat16", "amax_history_length": 16}),
        ((get("mixed_bfloat16"), 16), {}),
    ],
    ids=repr,
)
def test_both_forms_make_the_same_policy(arguments, keywords):
    assert QuantizedFloat8DTypePolicy(*arguments, **keywords) == EXPECTED


def test_a_dtype_object_is_a_source():
    assert QuantizedFloat8DTypePolicy(torch.bfloat16).name == "float8_from_bfloat16"


def test_mode_alone_starts_from_the_global_policy():
    with policy_scope("mixed_float16"):
        assert QuantizedFloat8DTypePolicy("float8", 8).name == "float8_from_mixed_float16"


def test_history_is_1024_where_it_is_not_given():
    assert QuantizedFloat8DTypePolicy("float32").amax_history_length == 1024
    assert get("float8_from_float32").amax_history_length == QuantizedFloat8DTypePolicy.default_amax_history_length


def test_settings_are_in_the_config():  # H-10
    settings = {"amax_history_length": 32, "margin": 1, "amax_compute_algo": "most_recent"}
    policy = QuantizedFloat8DTypePolicy("float32", **settings, high_precision_weight_gradient=True)
    expected = {"mode": "float8", "source_name": "float32", **settings, "high_precision_weight_gradient": True}
    assert policy.get_config() == expected
    assert serialize(policy) == {"class_name": "QuantizedFloat8DTypePolicy", "config": expected}


def test_settings_that_differ_from_the_default_are_printed():  # P-05
    policy = QuantizedFloat8DTypePolicy("float32", amax_history_length=32, margin=1)
    assert repr(policy) == '<QuantizedFloat8DTypePolicy "float8_from_float32", amax_history_length=32, margin=1>'
    assert repr(get("float8_from_float32")) == '<QuantizedFloat8DTypePolicy "float8_from_float32">'


@pytest.mark.parametrize("length", [True, False, 1.0, "16", [16]], ids=repr)
def test_history_of_the_wrong_type_is_a_type_error(length):  # P-03
    with pytest.raises(
        PolicyTypeError, match=r"amax_history_length is not an integer. Got mode='float8', amax_history"
    ):
        QuantizedFloat8DTypePolicy("float8", "float32", length)


@pytest.mark.parametrize("length", [0, -1, numpy.int64(-5)], ids=repr)
def test_history_of_nothing_is_refused(length):  # P-03
    with pytest.raises(
        PolicyError, match=r"amax_history_length is out of range\. .* Expected an integer of at least 1"
    ):
        QuantizedFloat8DTypePolicy("float32", length)


@pytest.mark.parametrize("margin", [-1, 9, 2000])
def test_margin_that_leaves_no_scale_is_refused(margin):
    with pytest.raises(
        PolicyError, match=rf"margin is out of range\. .*margin={margin}.* Expected an integer from 0 to 8"
    ):
        QuantizedFloat8DTypePolicy("float32", margin=margin)


def test_largest_float32_has_a_scale_with_a_finite_reciprocal_at_every_margin():
    smallest = numpy.float32(448 * 2.0**-8) / numpy.finfo(numpy.float32).max
    assert smallest > 0
    assert numpy.isfinite(1 / smallest)


def test_bool_as_second_argument_is_no_history():
    with pytest.raises(PolicyTypeError, match="amax_history_length=True"):
        QuantizedFloat8DTypePolicy("float32", True)


def test_words_and_flags_are_printed_as_python_writes_them():
    policy = get("float8/current_from_float32").from_config(
        {"mode": "float8/current", "source_name": "float32", "high_precision_weight_gradient": True}
    )
    assert repr(policy).endswith('"float8/current_from_float32", high_precision_weight_gradient=True>')
    policy = QuantizedFloat8DTypePolicy("float32", amax_compute_algo="most_recent")
    assert repr(policy).endswith(", amax_compute_algo='most_recent'>")


@pytest.mark.parametrize(
    "setting, value, error, text",
    [
        ("amax_compute_algo", "newest", PolicyError, "is unknown. Got mode='float8', amax_compute_algo='newest'"),
        ("amax_compute_algo", 1, PolicyTypeError, "is not text"),
        ("high_precision_weight_gradient", 1, PolicyTypeError, "is not a bool. .* Expected False or True"),
    ],
    ids=str,
)
def test_words_and_flags_of_other_values_are_refused(setting, value, error, text):  # F-17
    with pytest.raises(error, match=text):
        QuantizedFloat8DTypePolicy("float32", **{setting: value})


@pytest.mark.parametrize("setting", ["amax_history_length", "margin", "amax_compute_algo"])
def test_modes_without_history_have_no_such_setting(setting):
    policy = get("float8/current_from_float32")
    assert getattr(policy, setting) is None
    assert setting not in policy.get_config()
    with pytest.raises(PolicyError, match=f"Quantization mode 'float8/current' has no setting {setting}"):
        QuantizedFloat8DTypePolicy("float8/current", "float32", **{setting: 16})


def test_neither_name_nor_mode_is_a_type_error():
    with pytest.raises(TypeError, match="needs a name or a mode"):
        QuantizedFloat8DTypePolicy()


@pytest.mark.parametrize(
    "arguments, keywords, error",
    [
        (("float8_from_float32", "float16"), {}, PolicyError),
        (("float8", 16, 16), {}, TypeError),
        (("float8",), {"mode": "float8"}, TypeError),
    ],
    ids=repr,
)
def test_nothing_is_given_twice(arguments, keywords, error):
    with pytest.raises(error, match=r"twice|two values|not both"):
        QuantizedFloat8DTypePolicy(*arguments, **keywords)


@pytest.mark.parametrize("name", ["int8", "gptq/4/128", "int8_from_float32"])
def test_modes_of_other_classes_are_refused(name):  # P-04
    with pytest.raises(PolicyError, match="not to QuantizedFloat8DTypePolicy"):
        QuantizedFloat8DTypePolicy(name)


def test_unknown_float_policy_suggests_the_nearest():
    with pytest.raises(PolicyError, match="did you mean 'float32'"):
        QuantizedFloat8DTypePolicy("flaot32")
