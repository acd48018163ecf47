"""Policy files: TOML and JSON, read, written and refused."""

from __future__ import annotations

import json
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, QuantizedFloat8DTypePolicy, asked, files, get, keep
from narrowcast.errors import PolicyError, PolicyFileError

TOML = r"""
narrowcast = 1                                   # format version
default = "keep"
[rules]
'encoder/layer/\d+/.*' = "int8"
'encoder/layer/0/.*' = "keep"                    # vetoes the pattern above
"pooler/dense" = { mode = "float8", source = "mixed_bfloat16", amax_history_length = 16 }
[optional]                                       # may match nothing
'.*/lm_head' = "keep"
"""
MAP = DTypePolicyMap(
    "keep",
    {
        r"encoder/layer/\d+/.*": "int8",
        "encoder/layer/0/.*": "keep",
        "pooler/dense": QuantizedFloat8DTypePolicy("mixed_bfloat16", amax_history_length=16),
        ".*/lm_head": "keep",
    },
    optional=[".*/lm_head"],
)


def test_toml_is_read():
    policies = files.loads(TOML)
    assert policies == MAP
    assert policies["encoder/layer/3/query"] == asked("int8")
    assert policies["encoder/layer/0/query"] is keep


def test_json_twin_means_the_same():
    assert files.loads(files.dumps(MAP), "json") == MAP


@pytest.mark.parametrize("suffix", [".toml", ".json", ".TOML", ".JSON"])
def test_form_is_known_by_the_ending(tmp_path, suffix):
    path = tmp_path / f"policy{suffix}"
    path.write_text(TOML if suffix.lower() == ".toml" else files.dumps(MAP), encoding="utf-8")
    assert files.read(path) == files.read(str(path)) == MAP


def test_file_is_written_and_read_back(tmp_path):
    files.write(MAP, tmp_path / "policy.json")
    assert files.read(tmp_path / "policy.json") == MAP
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]


def test_file_that_is_there_is_replaced(tmp_path):
    path = tmp_path / "policy.json"
    files.write(MAP, path)
    files.write(DTypePolicyMap(), path)
    assert files.read(path) == DTypePolicyMap()


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    files.write(MAP, path)
    monkeypatch.setattr(type(path), "replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        files.write(DTypePolicyMap(), path)
    assert files.read(path) == MAP
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_may_write_one_file(tmp_path):
    path = tmp_path / "policy.json"
    threads = [threading.Thread(target=files.write, args=(MAP, path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read(path) == MAP


def test_map_without_default_stays_without():
    assert "default" not in json.loads(files.dumps(DTypePolicyMap()))
    assert not files.loads("narrowcast = 1").has_default


def test_storage_dtype_and_mode_of_one_name_are_told_apart():
    policies = DTypePolicyMap(None, {"a": DTypePolicy("int8"), "b": "int8"})
    assert json.loads(files.dumps(policies))["rules"] == {"a": {"dtype": "int8"}, "b": "int8_from_keep"}
    assert files.loads(files.dumps(policies), "json") == policies


def test_mode_in_a_table_starts_from_what_the_layer_has():
    assert files.loads("narrowcast = 1\n[rules]\na = {mode = 'gptq/4/128'}")["a"] == asked("gptq/4/128")


POLICIES = st.sampled_from(
    [
        *(
            get(name)
            for name in ("float32", "mixed_float16", "int8", "int4", "float8_e5m2", "keep", "int8_from_float16")
        ),
        *(get(name) for name in ("int4/-1_from_keep", "awq/4/64_from_bfloat16", "float8/block_from_mixed_bfloat16")),
        QuantizedFloat8DTypePolicy("float8", "keep", 8, margin=2),
    ]
)
KEYS = st.text(
    st.characters(min_codepoint=32, exclude_categories=["Cs"], exclude_characters="\x7f()[]{}*+?\\"), max_size=20
)


@settings(deadline=None)
@given(default=st.none() | POLICIES, rules=st.dictionaries(KEYS, POLICIES, max_size=5), data=st.data())
def test_whatever_is_written_is_read_back_equal(default, rules, data):
    optional = data.draw(st.lists(st.sampled_from(sorted(rules)), unique=True)) if rules else []
    policies = DTypePolicyMap(default, rules, optional=optional)
    again = files.loads(files.dumps(policies), "json")
    assert again == policies
    assert files.dumps(again) == files.dumps(files.loads(files.dumps(again), "json"))


HEAD = "narrowcast = 1\n[rules]\n"


@pytest.mark.parametrize(
    "text, message",
    [
        # versions
        ("default = 'keep'", r"p.toml: Format version is missing.*Begin the file with narrowcast = 1"),
        ("", r"Format version is missing"),
        ("narrowcast = 2", r"p.toml, line 1: Format version is newer than this narrowcast. Got narrowcast=2.*Update"),
        ("\nnarrowcast = 99\nfuture = 1", r"line 2: Format version is newer"),
        *(
            (f"narrowcast = {bad}", r"line 1: Format version is not a version")
            for bad in ("0", "-1", "'1'", "1.0", "true")
        ),
        # fields
        ("narrowcast = 1\nrule = {}", r"line 2: Field 'rule' is unknown.*did you mean 'rules'\?"),
        (
            "narrowcast = 1\n'encoder/.*' = 'int8'",
            r"line 2: Field 'encoder/\.\*' is unknown.*Rules stand under \[rules\]",
        ),
        ("narrowcast = 1\nrules = 'int8'", r"line 2: Field 'rules' is not a table. Got rules='int8'"),
        ("narrowcast = 1\noptional = ['a']", r"line 2: Field 'optional' is not a table"),
        ("narrowcast = 1\ndefault = 5", r"line 2: Policy is neither text nor a table. Got policy=5"),
        (
            "narrowcast = 1\ndefault = 'flot32'",
            r"line 2: Policy is unknown. Got policy='flot32'.*did you mean 'float32'",
        ),
        # rules
        (HEAD + "a = 5", r"p.toml, line 3: Policy is neither text nor a table. Got policy=5"),
        (HEAD + "a = true", r"line 3: Policy is neither text nor a table"),
        (HEAD + "a = ['int8']", r"line 3: Policy is neither text nor a table"),
        (HEAD + "\n\na = 'int9'", r"line 5: Policy is unknown.*did you mean 'int8'"),
        (HEAD + "'(' = 'int8'", r"line 3: Key is not a regular expression"),
        (HEAD + "a = 'int8'\na = 'keep'", r"line 4: .*Write each key once"),
        (HEAD + "a = 'int8'\n[optional]\na = 'keep'", r"Key 'a' stands in rules and in optional"),
        (
            HEAD + "encoder.layer = 'int8'",
            r"line 3: Policy table says no policy.*Write a key that holds dots in quotes",
        ),
        # tables
        (HEAD + "a = {}", r"line 3: Policy table says no policy. Got policy={}"),
        (HEAD + "a = {mode = 5}", r"line 3: Policy table says no policy"),
        (HEAD + "a = {mode = 'int8', dtype = 'int8'}", r"line 3: Policy table says no policy"),
        (HEAD + "a = {dtype = 'int8', source = 'float32'}", r"line 3: Policy table says no policy"),
        (HEAD + "a = {dtype = 'int9'}", r"line 3: Policy name is unknown"),
        (HEAD + "a = {mode = 'int8', source = 5}", r"line 3: Policy name is not text. Got name=5"),
        (
            HEAD + "a = {mode = 'int8', source = 'int32'}",
            r"line 3: Source of a quantized policy does not compute in floats",
        ),
        (
            HEAD + "a = {mode = 'float8', amax_history = 1}",
            r"no setting amax_history.*did you mean 'amax_history_length'",
        ),
        (
            HEAD + "a = {mode = 'float8', amax_history_length = '1'}",
            r"line 3: Setting amax_history_length is not an int",
        ),
        (
            HEAD + "a = {mode = 'float8', amax_history_length = true}",
            r"line 3: Setting amax_history_length is not an int",
        ),
        (
            HEAD + "a = {mode = 'float8', amax_history_length = 0}",
            r"line 3: Setting amax_history_length is out of range",
        ),
        (
            HEAD + "a = {mode = 'int8', amax_history_length = 1}",
            r"line 3: Quantization mode 'int8' has no setting amax",
        ),
        # syntax
        (HEAD + "a = ", r"p.toml, line 3: Text is not TOML: Invalid value"),
        ("narrowcast = 1\n[rules", r"p.toml.*: Text is not TOML"),
        (
            HEAD + r'"encoder/layer/\d+/.*" = "int8"',
            r"p.toml, line 3: Text is not TOML: .*Write regular expressions in single",
        ),
        (
            HEAD + r'"a/\w+" = "int8"',
            r"line 3: .*Write regular expressions in single quotes, where a backslash is a backslash",
        ),
        (
            HEAD + r'"a\b" = "int8"',
            r"Key has control characters: a backslash in double quotes begins an escape.*single quotes",
        ),
        (HEAD + r'"\t+/a" = "int8"', r"Key has control characters"),
    ],
)
def test_bad_toml_is_refused_with_its_place(text, message):
    with pytest.raises(PolicyFileError, match=message) as caught:
        files.loads(text, name="p.toml")
    assert str(caught.value).startswith("p.toml")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"p.json, line 1: Text is not JSON"),
        ("[]", r"p.json: File holds no table. Got type='list'"),
        ("null", r"File holds no table"),
        ('{"narrowcast": 1,}', r"Text is not JSON"),
        ('{"narrowcast": 2}', r"line 1: Format version is newer"),
        ('{"narrowcast": true}', r"Format version is not a version"),
        ('{"narrowcast": 1.0}', r"Format version is not a version"),
        ('{"narrowcast": 1,\n "rules": {"a": "int8",\n "a": "keep"}}', r"Key 'a' stands twice in one table"),
        ('{"narrowcast": 1,\n "narrowcast": 1}', r"Key 'narrowcast' stands twice"),
        (
            '{"narrowcast": 1,\n "rules": {"a/\\d": "int8"}}',
            r"line 2: Text is not JSON: .*Write a backslash in JSON twice",
        ),
        ('{"narrowcast": 1,\n "rules": {"a\\b": "int8"}}', r"Key has control characters"),
        ('{"narrowcast": 1,\n "rules": {"a": null}}', r"line 2: Policy is neither text nor a table"),
        ('{"narrowcast": 1,\n "rules": {"a": NaN}}', r"line 2: Policy is neither text nor a table"),
        ('{"narrowcast": 1, "rules": ' + "[" * 100_000, r"Tables are nested too deeply"),
    ],
)
def test_bad_json_is_refused_with_its_place(text, message):
    with pytest.raises(PolicyFileError, match=message):
        files.loads(text, "json", name="p.json")


def test_file_of_another_ending_is_refused(tmp_path):
    with pytest.raises(PolicyFileError, match=r"Policy file is of no known form.*Expected a .toml or .json file"):
        files.read(tmp_path / "policy.yaml")


def test_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"narrowcast = 1\n# \xff")
    with pytest.raises(PolicyFileError, match=r"p.toml is not text"):
        files.read(tmp_path / "p.toml")


def test_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"\xef\xbb\xbfnarrowcast = 1")
    assert files.read(tmp_path / "p.toml") == DTypePolicyMap()


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "p.toml")


def test_toml_is_not_written(tmp_path):
    with pytest.raises(PolicyError, match=r"Policy files are written as JSON"):
        files.write(MAP, tmp_path / "p.toml")
    assert list(tmp_path.iterdir()) == []


class Mine(DTypePolicy):
    """A user's own policy."""


def test_policy_of_an_unknown_class_is_not_written():
    with pytest.raises(PolicyError, match="of a class that policy files do not know"):
        files.dumps(DTypePolicyMap(None, {"a": Mine("float16")}))


def test_key_with_control_characters_is_not_written():
    with pytest.raises(PolicyError, match="Key has control characters"):
        files.dumps(DTypePolicyMap(None, {"a\tb": "float16"}))


def test_written_file_may_be_read_by_others(tmp_path):
    previous = os.umask(0o022)
    try:
        files.write(MAP, tmp_path / "policy.json")
    finally:
        os.umask(previous)
    assert (tmp_path / "policy.json").stat().st_mode & 0o777 == 0o644
