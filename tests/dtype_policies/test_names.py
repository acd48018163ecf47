"""The grammar of names: parsing and formatting are inverses, and there is one spelling for each value."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.dtype_policies import QuantizedDTypePolicy, get, registry
from narrowcast.dtype_policies.names import Choice, Grammar, Setting, join_name, split_name
from narrowcast.errors import PolicyError, PolicyTypeError

MODES = [mode for mode in registry.modes() if mode.is_quantized]
SOURCES = ["float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16", "keep"]


def values_of(setting: Setting | Choice) -> st.SearchStrategy[Any]:
    if isinstance(setting, Choice):
        return st.sampled_from(setting.choices)
    numbers = (
        st.sampled_from(setting.choices)
        if setting.choices
        else st.integers(setting.minimum, min(setting.maximum, 10**9 - 1))
    )
    return numbers | st.sampled_from(setting.special) if setting.special else numbers


@st.composite
def mode_texts(draw: st.DrawFn) -> tuple[registry.Mode, dict[str, int]]:
    mode = draw(st.sampled_from(MODES))
    return mode, {number.name: draw(values_of(number)) for number in mode.grammar.numbers}


@given(mode_texts())
def test_mode_is_read_as_it_was_written(drawn):
    mode, values = drawn
    assert registry.parse_mode(mode.grammar.format(values)) == (mode, values)


@given(mode_texts(), st.sampled_from(SOURCES))
def test_name_of_a_quantized_policy_makes_it_again(drawn, source):
    mode, values = drawn
    policy = registry.make(mode.grammar.format(values), source)
    assert get(policy.name) == policy
    assert (policy.quantization_mode, policy.source.name) == (mode.name, source)
    for name, value in values.items():
        assert getattr(policy, name) == value


@given(mode_texts(), st.sampled_from(SOURCES), st.data())
@settings(max_examples=200)
def test_config_of_a_quantized_policy_makes_it_again(drawn, source, data):
    mode, values = drawn
    options = {option.name: data.draw(values_of(option)) for option in mode.options}
    policy = registry.make(mode.grammar.format(values), source, **options)
    assert type(policy).from_config(policy.get_config()) == policy
    assert registry.deserialize(registry.serialize(policy)) == policy


PIECES = [
    "int8",
    "int4",
    "gptq",
    "awq",
    "float8",
    "mxfp4",
    "weight",
    "current",
    "/",
    "/",
    "4",
    "128",
    "-1",
    "0",
    " ",
    "-",
]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
@settings(max_examples=500)
def test_whatever_text_is_read_is_written_back_the_same(text):
    try:
        mode, values = registry.parse_mode(text)
    except PolicyError:
        return
    assert mode.grammar.format(values) == text


@given(st.text(), st.text())
def test_splitting_undoes_joining(mode, source):
    if "_from_" not in mode + source and not (mode + "_from_").startswith("_from_" + mode):
        assert split_name(join_name(mode, source)) == (mode, source)


@pytest.mark.parametrize(
    "number", ["0128", "+128", " 128", "128 ", "1_28", "-0", "00", "१२", "1e3", "128.0", "0x80", ""]
)
def test_number_has_one_spelling(number):  # P-07
    with pytest.raises(PolicyError, match=r"Setting group_size is not written as a number. Got mode='gptq/4/"):
        registry.parse_mode(f"gptq/4/{number}")


def test_number_of_thousands_of_digits_is_refused_at_once():
    with pytest.raises(PolicyError, match="not written as a number"):
        registry.parse_mode("int4/" + "9" * 100_000)


@pytest.mark.parametrize("mode", ["int4/0", "int4/-2", "gptq/4/0", "awq/4/-7"])
def test_group_size_is_out_of_range(mode):
    with pytest.raises(PolicyError, match=r"out of range.*Expected -1 .* or an integer of at least 1"):
        registry.parse_mode(mode)


@pytest.mark.parametrize(
    "value", [True, False, 1.0, "4", None, [4], numpy.True_, numpy.ones(1), numpy.ones(2, int)], ids=repr
)
def test_setting_is_an_integer_and_no_bool(value):  # P-03, Q-20
    with pytest.raises(PolicyTypeError, match=r"Setting size is not an integer. Got mode='m', size="):
        Setting("size", "1 or more").check(value, mode="m")


def test_incomplete_mode_lists_its_family():
    with pytest.raises(PolicyError, match=r"incomplete. Got mode='int4'. Expected one of int4/<block_size>\."):
        registry.parse_mode("int4")


def test_misspelled_mode_suggests_the_nearest():
    with pytest.raises(PolicyError, match="did you mean 'float8/current'"):
        registry.parse_mode("float8/curent")


def test_grammar_fits_by_whole_words():
    assert not Grammar("int8").fits("int8x")
    assert not Grammar("int8").fits("int8/weight")
    assert Grammar("int8/weight").fits("int8/weight")


@pytest.mark.parametrize("name", ["int8_from_int8_from_float32", "int8_from_", "_from_float32", "int8 _from_float32"])
def test_name_that_is_nearly_one_is_refused(name):
    with pytest.raises(PolicyError):
        get(name)


def test_source_and_mode_are_not_taken_for_each_other():
    with pytest.raises(PolicyError, match=r"Quantization mode is unknown. Got mode='float32'"):
        QuantizedDTypePolicy("float32", "int8")
