"""Keras' own policy classes and ours, driven by the same random operations: equal results and equal kinds of error.

Where narrowcast differs on purpose, the operation is left out here, stands in docs/differences-from-keras.md, and has a
test of its own in test_differences_from_keras.py.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import narrowcast.config
from narrowcast import dtype_policies as ours
from tests.dtype_policies.outcomes import describe, keras, outcome

theirs = keras.dtype_policies


def words(text: str, *more: str) -> list[str]:
    return [*text.split(), *more]


FLOATS = words("float16 bfloat16 float32 float64 mixed_float16 mixed_bfloat16")
OTHERS = words("int32 uint8 int16 uint64 bool complex64 complex128 string")
QUANTIZED = words("""
    int8_from_float32 int8_from_mixed_bfloat16 float8_from_mixed_float16 int4/128_from_float16 int4/-1_from_float32
    gptq/4/128_from_mixed_bfloat16 gptq/8/-1_from_float32 awq/4/64_from_bfloat16
""")
BAD_NAMES = words(
    """
    flot32 FLOAT32 mixed_float64 mixed_int8 _from_float32 int8_from_ int8_from int9_from_float32 int8_from_flot32
    int8_from_int8_from_float32 float8_from_ float8 int8/7_from_float32 gptq_from_float32 gptq/4_from_float32
    gptq/5/128_from_float32 gptq/4/0_from_float32 gptq/4/128 awq/3/128_from_float32 awq/4/-2_from_float32
    int4/0_from_float32 int4/x_from_float32 int4/_from_float32
    """,
    "",
    "float32 ",
)
NAMES = st.sampled_from(FLOATS + OTHERS + QUANTIZED + BAD_NAMES) | st.text(max_size=12)
PLAIN_NAMES = st.sampled_from(FLOATS + OTHERS + BAD_NAMES) | st.text(max_size=12)
GOOD_NAMES = st.sampled_from(FLOATS + OTHERS + QUANTIZED)
NO_POLICIES = st.sampled_from(
    [5, 1.5, b"float32", (), ("float32",), [], {1}, numpy.zeros(2), Exception, NotImplemented]
)
DTYPES = st.sampled_from(
    [torch.float16, torch.int32, numpy.float32, numpy.dtype("uint8"), float, int, bool, complex, str]
)
MODES = st.sampled_from(
    words(
        """
        int8 float8 int4 gptq awq int4/128 int4/-1 int4/0 int4/x int4/-2 int4// int4/128/1 gptq/4/128 gptq/2/-1
        gptq/5/128 gptq/4 gptq/4/x awq/4/128 awq/4/-1 awq/8/128 awq/4/0 banana float32 INT8 int8_from_float32
        """,
        "",
    )
)
SOURCES = st.sampled_from([*FLOATS, "flot32", "", "int8_from_float32", "mixed_float64"]) | NO_POLICIES

# The classes that take a mode, and the modes whose class in Keras is the only one they have here.
CLASSES = {
    "QuantizedDTypePolicy": ("int8",),
    "QuantizedFloat8DTypePolicy": ("float8",),
    "Int4DTypePolicy": ("int4",),
    "GPTQDTypePolicy": ("gptq",),
    "AWQDTypePolicy": ("awq",),
}
KERAS_MODES = ("int8", "float8", "int4", "gptq", "awq")

fast = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def both(call: Any) -> None:
    """Asserts that `call(library)` comes to the same with both libraries."""
    assert outcome(lambda: call(ours)) == outcome(lambda: call(theirs))


@pytest.fixture(autouse=True)
def _global_policies_restored():
    yield
    keras.config.set_dtype_policy("float32")
    narrowcast.config.set_dtype_policy("float32")


def is_read_on_one_side_only(name: Any) -> bool:
    """Whether a name is a policy's for one of the two libraries on purpose."""
    if not isinstance(name, str):
        return False
    if name in ours.dtypes.ALL:  # difference: every dtype of the table
        return name.startswith(KERAS_MODES) or name not in keras.src.backend.common.dtypes.ALLOWED_DTYPES
    return name == "keep" or name == "int" or "torch" in name  # difference: one spelling for each dtype


@fast
@given(name=PLAIN_NAMES | NO_POLICIES)
def test_a_plain_policy_is_made_alike(name):
    assume(not is_read_on_one_side_only(name))
    both(lambda library: library.DTypePolicy(name))
    both(lambda library: library.FloatDTypePolicy(name))


@fast
@given(name=NAMES | NO_POLICIES | DTYPES)
def test_get_reads_alike(name):
    assume(not is_read_on_one_side_only(name))
    both(lambda library: library.get(name))


@fast
@given(class_name=st.sampled_from(sorted(CLASSES)), mode=MODES, source=SOURCES)
def test_a_quantized_policy_is_made_alike(class_name, mode, source):
    own_mode = mode.split("/")[0] in CLASSES[class_name]
    assume(own_mode or mode not in KERAS_MODES)  # difference: one class for each mode
    assume(not (class_name == "QuantizedFloat8DTypePolicy" and mode not in KERAS_MODES))  # difference: its other form
    assume(not (mode == "int8" and repr(source) in ("'float16'", "'mixed_float16'")))  # difference: int8 from float16
    assume(not (class_name == "QuantizedFloat8DTypePolicy" and isinstance(source, int)))  # difference: its other form
    if not isinstance(source, str):  # where two things are wrong, either may be found first
        assume(outcome(lambda: getattr(ours, class_name)(mode, "float32"))[0] == "returned")
    both(lambda library: getattr(library, class_name)(mode, source))
    both(lambda library: getattr(library, class_name)(mode=mode, source_name=source))


@fast
@given(length=st.integers(1, 10**6) | st.sampled_from([1.5, "16", [16], b"16"]), source=st.sampled_from(FLOATS))
def test_the_history_length_is_taken_alike(length, source):
    def make(library: Any) -> Any:
        policy = library.QuantizedFloat8DTypePolicy("float8", source, length)
        same = library.QuantizedFloat8DTypePolicy(mode="float8", source_name=source, amax_history_length=length)
        return policy.amax_history_length, policy == same, policy.name

    both(make)


@fast
@given(name=GOOD_NAMES)
def test_configs_are_alike_and_make_equal_policies(name):
    mine, other = ours.get(name), theirs.get(name)
    config = mine.get_config()
    for name in ("margin", "amax_compute_algo", "high_precision_weight_gradient"):
        config.pop(name, None)  # difference: settings of ours
    assert config == other.get_config()
    assert describe(type(mine).from_config(config)) == describe(type(other).from_config(config))


@fast
@given(first=GOOD_NAMES, second=GOOD_NAMES)
def test_policies_are_equal_alike(first, second):
    both(lambda library: library.get(first) == library.get(second))
    both(lambda library: library.get(first) == second)
    both(lambda library: library.get(first) != library.FloatDTypePolicy("float32"))
    both(lambda library: library.FloatDTypePolicy("float16") == library.get(first))


@fast
@given(
    config=st.sampled_from([{}, {"name": "float32"}, {"nome": "float32"}, {"name": 5}, {"name": "x"}, {"mode": "int8"}])
)
@pytest.mark.parametrize("class_name", ["DTypePolicy", "QuantizedDTypePolicy", "Int4DTypePolicy"])
def test_bad_configs_are_refused_alike(class_name, config):
    both(lambda library: getattr(library, class_name).from_config(dict(config)))


@fast
@given(name=GOOD_NAMES)
def test_what_keras_serialized_is_read(name):
    config = theirs.serialize(theirs.get(name))
    before = copy.deepcopy(config)
    assert describe(ours.deserialize(config)) == describe(theirs.deserialize(config))
    assert config == before


@fast
@given(names=st.lists(NAMES | st.sampled_from([None, 5, (), b"float32"]), max_size=3))
def test_the_global_policy_is_set_and_read_alike(names):
    def run(config: Any, library: Any) -> list[Any]:
        config.set_dtype_policy("float32")
        steps = []
        for name in names:
            steps.append(outcome(lambda name=name: config.set_dtype_policy(name)))
            steps.append(outcome(config.dtype_policy))
            steps.append(outcome(lambda: library.get(None)))
            if config.dtype_policy().quantization_mode is None:  # difference: a quantized global policy has a source
                steps.append(outcome(library.DTypePolicy))
                steps.append(outcome(lambda: library.QuantizedFloat8DTypePolicy("float8")))
                steps.append(outcome(lambda: library.DTypePolicyMap().default_policy))
        return steps

    assume(not any(is_read_on_one_side_only(name) for name in names))
    assume(not any(name in OTHERS for name in names))  # difference: a quantized policy's source computes in floats
    assert run(narrowcast.config, ours) == run(keras.config, theirs)


KEYS = st.sampled_from(words("encoder encoder/.* encoder/dense encoder/.*/q .*/k decoder decoder/[ab] x|y . ü/.*", ""))
PATHS = st.sampled_from(
    words("encoder encoder/dense encoder/0/q encoder/k decoder decoder/a decoder/c x y ü/ö my/encoder encoder2 a/b/c")
)
VALUES = st.sampled_from([*FLOATS, *OTHERS, *QUANTIZED, "flot32", "int8_from_", "gptq_from_float32", 5, (), b"x"])


class Maps(RuleBasedStateMachine):
    """One map of each library, changed and read in the same ways."""

    @initialize(default=st.none() | VALUES | st.just("a map"))
    def make(self, default):
        def made(library: Any) -> Any:
            value = library.DTypePolicyMap() if default == "a map" else default
            return library.DTypePolicyMap(default_policy=value)

        assert outcome(lambda: made(ours)) == outcome(lambda: made(theirs))
        if outcome(lambda: made(ours))[0] == "raised":
            default = "float32"
        self.mine, self.other = made(ours), made(theirs)

    def both(self, call: Any) -> None:
        assert outcome(lambda: call(self.mine)) == outcome(lambda: call(self.other))

    @rule(key=KEYS, value=VALUES, as_policy=st.booleans())
    def assign(self, key, value, as_policy):
        def assigned(policies: Any, library: Any) -> None:
            policies[key] = library.get(value) if as_policy else value

        assert outcome(lambda: assigned(self.mine, ours)) == outcome(lambda: assigned(self.other, theirs))

    def agrees(self, path: str) -> bool:
        """Whether the rules that match a path all give one policy, which is an error in Keras only."""
        keys = [key for key in self.mine if re.fullmatch(key, path)]
        return path in self.mine or len(keys) < 2 or len({self.mine[key] for key in keys}) > 1

    @rule(path=PATHS | KEYS)
    def look_up(self, path):
        if self.agrees(path):
            self.both(lambda policies: policies[path])
            if any(re.fullmatch(key, path) for key in self.mine) or path in self.mine:
                self.both(lambda policies: policies.get(path))

    @rule(key=KEYS)
    def delete(self, key):
        def deleted(policies: Any) -> None:
            del policies[key]

        self.both(deleted)

    @rule(key=KEYS)
    def pop(self, key):
        self.both(lambda policies: policies.pop(key))

    @rule()
    def pop_item(self):
        self.both(lambda policies: policies.popitem())

    @rule()
    def clear(self):
        self.both(lambda policies: policies.clear())

    @rule(keys=st.lists(KEYS, max_size=3, unique=True), value=st.sampled_from(FLOATS))
    def update_with_new_keys(self, keys, value):
        new = {key: value for key in keys if key not in self.mine}
        self.both(lambda policies: policies.update(new))
        self.both(
            lambda policies: policies.update(
                list({f"new/{key}": value for key in new if f"new/{key}" not in policies}.items())
            )
        )

    @rule(key=KEYS | st.sampled_from([5, None, ()]))
    def contains(self, key):
        self.both(lambda policies: key in policies)

    @rule()
    @precondition(lambda self: self.mine.has_default)
    def round_trip(self):
        config = keras.saving.serialize_keras_object(self.other)
        self.mine, self.other = ours.deserialize(config), theirs.deserialize(config)

    @rule()
    @precondition(lambda self: self.mine.has_default)
    def own_round_trip(self):
        self.mine = ours.deserialize(ours.serialize(self.mine))

    @rule(name=st.sampled_from(FLOATS))
    def nested_map_as_default(self, name):
        both(lambda library: library.DTypePolicyMap(library.DTypePolicyMap(name)))

    @invariant()
    def all_that_can_be_seen_is_alike(self):
        if hasattr(self, "mine"):
            assert describe(self.mine) == describe(self.other)
            assert len(self.mine) == len(self.other)
            assert list(self.mine) == list(self.other)
            assert list(self.mine.keys()) == list(self.other.keys())
            assert describe(list(self.mine.values())) == describe(list(self.other.values()))


TestMaps = Maps.TestCase
TestMaps.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)


@fast
@given(
    rules=st.none() | NO_POLICIES | st.lists(st.tuples(st.text(), st.text())),
    default=st.sampled_from([None, "float16"]),
)
def test_rules_that_are_no_dict_are_refused_alike(rules, default):
    both(lambda library: library.DTypePolicyMap(default, rules))


ARRAYS = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64), torch.ones(2) > 0]
ARRAYS += [torch.ones(2, dtype=torch.complex64), torch.ones(2).to(torch.float8_e4m3fn)]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", torch.float16, "flot32"], ids=str)
def test_tensors_are_converted_alike(array, autocast, dtype):
    def convert(library: Any) -> Any:
        converted = library.DTypePolicy("float32").convert_input(array, autocast, dtype)
        return str(converted.dtype), converted.tolist(), converted is array

    both(convert)


@pytest.mark.parametrize("x", [1, 1.5, True, None, "text", 2 + 1j, object], ids=repr)
def test_what_is_no_array_is_passed_on_alike(x):
    both(lambda library: library.DTypePolicy("float32").convert_input(x, True, "float16") is x)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
@pytest.mark.parametrize("autocast", [True, False])
def test_symbolic_tensors_are_converted_alike(dtype, autocast):
    def convert(library: Any) -> Any:
        x = keras.KerasTensor((None, 3), dtype)
        converted = library.DTypePolicy("float32").convert_input(x, autocast, "float16")
        return converted.dtype, converted.shape, converted is x, x.dtype

    both(convert)
