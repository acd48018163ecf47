from __future__ import annotations

from pathlib import Path

import pytest

import narrowcast
from narrowcast.observe.compare import compare
from tests.cli.conftest import MODEL, Run
from tests.cli.models import batches, build

INPUTS = ("--inputs", "tests.cli.models:batches")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    narrowcast.save(narrowcast.apply(build(), "int8"), tmp_path / "out")
    return tmp_path / "out"


def test_each_layer_with_a_policy_has_its_error(run: Run, out: Path) -> None:
    done = run("compare", MODEL, out, *INPUTS)
    assert done.status == 0
    assert [line.split()[:2] for line in done.out.splitlines()[2:4]] == [
        ["0", "int8_from_float32"],
        ["3", "int8_from_float32"],
    ]
    assert "outputs: relative error 0.0" in done.out


def test_json_is_what_the_library_finds(run: Run, out: Path) -> None:
    data = run("compare", MODEL, out, *INPUTS, "--json").json
    expected = compare(build(), narrowcast.load(build(), out), batches(), budget_s=0.0).to_json()
    assert data["layers"] == expected["layers"]
    assert data["outputs"] == expected["outputs"]
    assert data["passed"] is True


def test_error_above_the_bound_exits_with_1(run: Run, out: Path) -> None:
    done = run("compare", MODEL, out, *INPUTS, "--max-error", "1e-9")
    assert done.status == 1
    assert "error: Relative error of the outputs" in done.err
    assert "wanted at most 1e-09" in done.err


def test_error_below_the_bound_exits_with_0(run: Run, out: Path) -> None:
    assert run("compare", MODEL, out, *INPUTS, "--max-error", "0.5").status == 0


def test_outputs_that_are_not_finite_exit_with_1(run: Run, out: Path) -> None:
    done = run("compare", MODEL, out, "--inputs", "tests.cli.models:batches_of_nan", "--json")
    assert done.status == 1
    assert done.json["passed"] is False


def test_html_is_written_beside(run: Run, out: Path, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    assert run("compare", MODEL, out, *INPUTS, "--html", page).status == 0
    assert "The layers with the largest own error" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tests.cli.models", "Expected package.module:callable"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("tests.cli.models:NOT_CALLABLE", "callable"),
        ("tests.cli.models:failing", "the disk is gone"),
        ("tests.cli.models:batchs", "did you mean 'batches'"),
        ("tests.cli.models:batches_of_words", "Model failed on the inputs"),
    ],
)
def test_inputs_that_cannot_be_called_exit_with_1(run: Run, out: Path, address: str, message: str) -> None:
    done = run("compare", MODEL, out, "--inputs", address)
    assert (done.status, done.out) == (1, "")
    assert message in done.err


def test_folder_that_holds_no_model_exits_with_1(run: Run, tmp_path: Path) -> None:
    done = run("compare", MODEL, tmp_path / "nothing", *INPUTS)
    assert (done.status, done.out) == (1, "")
    assert "nothing" in done.err


def test_a_model_with_other_weights_is_not_compared(run: Run, out: Path) -> None:
    done = run("compare", "tests.cli.models:build_at_random", out, *INPUTS)
    assert done.status == 1
    assert "made of a model with other weights" in done.err
    assert "set the seed" in done.err
