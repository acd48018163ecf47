from __future__ import annotations

from pathlib import Path

import pytest

import narrowcast
from tests.cli.conftest import MODEL, Run
from tests.cli.models import build


def test_without_a_policy_the_layers_are_listed(run: Run) -> None:
    done = run("plan", MODEL)
    assert done.status == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["path", "kind", "class", "parameters", "bytes"]
    assert ["0", "linear", "Linear", "weight", "64×64", "float32,", "bias", "64", "float32", "16.6", "kB"] in lines
    assert "5 layers, 6,368 parameters, 25.5 kB; 2 without parameters not shown" in done.out


def test_all_shows_layers_without_parameters_too(run: Run) -> None:
    done = run("plan", MODEL, "--all")
    assert "ReLU" in done.out
    assert "(root)" in done.out
    assert "not shown" not in done.out


def test_json_of_the_tree_is_what_the_library_reads(run: Run) -> None:
    data = run("plan", MODEL, "--json").json
    tree = narrowcast.tree(build())
    assert data == tree.to_json()
    assert data["sites"][1]["members"][0]["parameters"][0] == ["weight", [64, 64], "float32"]


def test_json_has_standard_output_for_itself(run: Run) -> None:
    done = run("plan", MODEL, "--policy", "int8", "--json")
    assert done.err == ""
    assert done.json == narrowcast.plan(build(), "int8").to_json()


def test_policy_is_a_name_or_a_file(run: Run, policy: Path) -> None:
    by_name, by_file = (run("plan", MODEL, "-p", value).out.splitlines() for value in ("int8", policy))
    assert any(line.split()[0] == "3" and "int8_from_float32" in line for line in by_name)
    assert any(line.split()[0] == "3" and "kept" in line for line in by_file)


def test_plan_is_the_table_of_the_library(run: Run, policy: Path) -> None:
    expected = narrowcast.plan(build(), narrowcast.read_policy(policy)).table().to_text()
    assert run("plan", MODEL, "--policy", policy).out == expected + "\n"


def test_map_that_does_not_hold_exits_with_1_and_lists_the_findings(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("narrowcast = 1\n[rules]\n'3x' = 'int8'\n'0|3' = 'int8'\n'.*' = 'bfloat16'\n", encoding="utf-8")
    done = run("plan", MODEL, "--policy", path)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert "3x" in done.err
    assert "bfloat16" in done.err


def test_error_is_json_where_json_is_asked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("narrowcast = 1\n[rules]\n'9' = 'int8'\n", encoding="utf-8")
    done = run("plan", MODEL, "--policy", path, "--json")
    assert done.status == 1
    error = done.json["error"]
    assert error["class"] == "PlanError"
    assert len(error["findings"]) == 1
    assert "'9'" in error["findings"][0]


def test_findings_are_warnings_where_they_are_let_through(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("narrowcast = 1\n[rules]\n'9' = 'int8'\n'0' = 'int8'\n", encoding="utf-8")
    done = run("plan", MODEL, "--policy", path, "--no-strict")
    assert done.status == 0
    assert done.err.startswith("warning: ")
    assert "'9'" in done.err


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("int9", "int9"),
        ("missing.toml", "Policy file cannot be read: No such file or directory. Got policy='missing.toml'."),
    ],
)
def test_policy_that_does_not_exist_exits_with_1(run: Run, policy: str, message: str) -> None:
    done = run("plan", MODEL, "--policy", policy)
    assert (done.status, done.out) == (1, "")
    assert message in done.err


@pytest.mark.parametrize(
    "address",
    [
        "no_such_module:build",
        "tests.cli.models:no_such_callable",
        "tests.cli.models:NOT_CALLABLE",
        "tests.cli.models:batches",
        "tests.cli.models:failing",
        "no/such/folder",
    ],
)
def test_model_that_does_not_exist_exits_with_1(run: Run, address: str) -> None:
    done = run("plan", address)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: ")


def test_hugging_face_folder_needs_no_weights(run: Run, tmp_path: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        architectures=["BertModel"],
    )
    config.save_pretrained(tmp_path)
    done = run("plan", tmp_path, "--policy", "int8", "--json")
    assert done.status == 0, done.err
    assert "encoder/layer/1/attention/self/query" in done.out


def test_html_is_written_beside(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run("plan", MODEL, "--policy", "int8", "--html", page)
    assert done.status == 0
    assert "int8_from_float32" in page.read_text("utf-8")
    assert done.err == f"Wrote {page}\n"


def test_a_page_that_cannot_be_written_is_an_error_and_nothing_else_is_said_on_standard_output(
    run: Run, tmp_path: Path
) -> None:
    done = run("plan", MODEL, "--html", tmp_path / "nowhere" / "plan.html", "--json")
    assert done.status == 1
    assert done.json["error"]["problem"] == "Page cannot be written: No such file or directory"


def test_errors_name_the_option_and_not_the_argument(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    narrowcast.write_policy(narrowcast.DTypePolicyMap(None, {"nowhere": "int8"}), path)
    done = run("plan", MODEL, "--policy", path)
    assert "or give --no-strict to keep these as warnings" in done.err
    assert "strict=False" not in run("plan", MODEL, "--policy", path, "--json").json["error"]["message"]


def test_short_names_are_understood_in_suggestions(run: Run) -> None:
    assert "did you mean 'float16'" in run("plan", MODEL, "--policy", "fp16").err
