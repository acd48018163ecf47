"""Quantized policies: their classes, modes and sources."""

from __future__ import annotations

import numpy
import pytest
import torch

from narrowcast.dtype_policies import (
    AWQDTypePolicy,
    DTypePolicy,
    DTypePolicyMap,
    GPTQDTypePolicy,
    Int4DTypePolicy,
    MXDTypePolicy,
    NVFP4DTypePolicy,
    QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy,
    asked,
    get,
    keep,
    policy_scope,
    registry,
)
from narrowcast.errors import PolicyError, PolicyTypeError

CLASSES = [
    QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy,
    Int4DTypePolicy,
    GPTQDTypePolicy,
    AWQDTypePolicy,
    MXDTypePolicy,
    NVFP4DTypePolicy,
]
TEXTS = {"int4": "int4/128", "gptq": "gptq/4/128", "awq": "awq/4/128"}
MODES = [mode for mode in registry.modes() if mode.is_quantized]


def text_of(mode: registry.Mode) -> str:
    return TEXTS.get(mode.name, mode.name)


@pytest.mark.parametrize("policy_class", CLASSES, ids=lambda policy_class: policy_class.__name__)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_class_accepts_its_own_modes_only(mode, policy_class):  # P-04
    if mode.policy_class is policy_class:
        assert policy_class(text_of(mode), "float32").quantization_mode == mode.name
    else:
        message = f"Quantization mode belongs to {mode.policy_class.__name__}, not to {policy_class.__name__}"
        with pytest.raises(PolicyError, match=message):
            policy_class(text_of(mode), "float32")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_policies_made_by_name_and_by_class_are_equal(mode):  # P-04
    text = text_of(mode)
    policy = mode.policy_class(text, "mixed_bfloat16")
    assert get(f"{text}_from_mixed_bfloat16") == policy
    assert type(get(policy.name)) is type(policy)
    assert repr(policy) == f'<{mode.policy_class.__name__} "{text}_from_mixed_bfloat16">'


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_mode_alone_is_asked_from_whatever_the_layer_has(mode):
    policy = asked(text_of(mode))
    assert policy.source is keep
    assert (policy.compute_dtype, policy.variable_dtype) == (None, None)
    assert policy.with_source("bfloat16") == get(f"{text_of(mode)}_from_bfloat16")


def test_source_gives_the_dtypes():
    policy = get("int8_from_mixed_bfloat16")
    assert (policy.compute_dtype, policy.variable_dtype) == ("bfloat16", "float32")
    assert policy.source == DTypePolicy("mixed_bfloat16")


@pytest.mark.parametrize("source", ["bfloat16", torch.bfloat16, DTypePolicy("bfloat16")], ids=repr)
def test_source_is_given_in_any_form(source):
    assert QuantizedDTypePolicy("int8", source) == get("int8_from_bfloat16")


@pytest.mark.parametrize("source", ["int32", "bool", "string", "complex64", numpy.int8, "int8_from_float32"], ids=repr)
def test_source_computes_in_floats(source):  # P-10
    with pytest.raises(PolicyError, match=r"Source of a quantized policy does not compute in floats. Got source_name="):
        QuantizedDTypePolicy("int8", source)


def test_source_is_no_map():
    with pytest.raises(PolicyError, match="does not compute in floats"):
        QuantizedDTypePolicy("int8", DTypePolicyMap("float32"))


@pytest.mark.parametrize("source", [5, b"float32", ["float32"]], ids=repr)
def test_source_of_no_known_type_is_a_type_error(source):
    with pytest.raises(PolicyTypeError):
        QuantizedDTypePolicy("int8", source)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_source_that_is_not_given_is_the_global_policy(mode):  # P-06, H-07
    with policy_scope("mixed_bfloat16"):
        policy = mode.policy_class(text_of(mode))
    assert policy.name == f"{text_of(mode)}_from_mixed_bfloat16"


def test_source_of_a_quantized_global_policy_is_its_source():  # G-06
    with policy_scope("int8_from_mixed_float16"):
        assert QuantizedDTypePolicy("int8/weight").name == "int8/weight_from_mixed_float16"
        assert DTypePolicy() == DTypePolicy("mixed_float16")


def test_int8_takes_float16():  # P-11
    assert QuantizedDTypePolicy("int8", "mixed_float16").compute_dtype == "float16"


def test_another_source_keeps_all_settings():
    policy = QuantizedFloat8DTypePolicy("float32", amax_history_length=3, margin=2)
    moved = policy.with_source("mixed_bfloat16")
    assert (moved.amax_history_length, moved.margin, moved.source.name) == (3, 2, "mixed_bfloat16")


def test_modes_with_different_numbers_are_different_policies():
    assert get("int4/64_from_float32") != get("int4/128_from_float32")
    assert get("int8_from_float32") != get("int8_from_float16")


@pytest.mark.parametrize("mode", [None, 5, b"int8", ["int8"]], ids=repr)
def test_mode_that_is_not_text_is_a_type_error(mode):
    with pytest.raises(PolicyTypeError, match="Quantization mode is not text"):
        QuantizedDTypePolicy(mode, "float32")


def test_subclass_of_a_user_has_the_modes_of_its_base():
    class Mine(Int4DTypePolicy):
        pass

    assert Mine("int4/32", "float32").block_size == 32
    with pytest.raises(PolicyError, match="belongs to QuantizedDTypePolicy, not to Mine"):
        Mine("int8", "float32")


@pytest.mark.parametrize("spelling", ["int4", "int4/None"])
def test_old_spelling_of_int4_is_read_and_never_written(spelling):  # P-08, H-01
    policy = get(f"{spelling}_from_float32")
    assert policy == Int4DTypePolicy("int4/-1", "float32")
    assert policy.get_config()["mode"] == "int4/-1"
    written = {"class_name": "Int4DTypePolicy", "config": {"mode": spelling, "source_name": "float32"}}
    assert registry.deserialize(written) == policy


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_has_bits_and_groups(bits):
    policy = GPTQDTypePolicy(f"gptq/{bits}/-1", "float32")
    assert (policy.weight_bits, policy.group_size, policy.quantization_mode) == (bits, -1, "gptq")


@pytest.mark.parametrize("bits", [0, 1, 5, 16])
def test_gptq_has_no_other_bits(bits):
    with pytest.raises(PolicyError, match=r"weight_bits .*Expected 2, 3, 4 or 8"):
        GPTQDTypePolicy(f"gptq/{bits}/128", "float32")


def test_awq_has_four_bits():
    assert AWQDTypePolicy("awq/4/128", "float32").weight_bits == 4
    with pytest.raises(PolicyError, match="weight_bits"):
        AWQDTypePolicy("awq/8/128", "float32")


def test_modes_that_calibrate_are_those_that_fit_to_inputs():
    assert {mode.name for mode in MODES if mode.needs_calibration} == {"gptq", "awq", "float8/static"}


def test_modes_that_train_keep_training_their_weights():
    trained = {mode.name for mode in MODES if mode.is_trainable}
    assert trained == {"float8", "float8/current", "float8/rowwise", "float8/block"}


def test_every_mode_says_what_it_does():
    assert all(mode.summary and mode.kinds for mode in MODES)
