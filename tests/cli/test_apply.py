from __future__ import annotations

from pathlib import Path

import torch

import narrowcast
from tests.cli.conftest import MODEL, Run
from tests.cli.models import batches, build


def test_saved_model_is_what_the_library_makes(run: Run, policy: Path, tmp_path: Path) -> None:
    assert run("apply", MODEL, "--policy", policy, "--out", tmp_path / "out").status == 0
    loaded = narrowcast.load(build().eval(), tmp_path / "out")
    expected = narrowcast.apply(build().eval(), narrowcast.read_policy(policy))
    assert torch.equal(loaded(batches()[0]), expected(batches()[0]))


def test_summary_says_bytes_and_statuses(run: Run, tmp_path: Path) -> None:
    done = run("apply", MODEL, "--policy", "int8", "--out", tmp_path / "out")
    assert done.out.startswith("25.5 kB → ")
    assert "2 applied" in done.out


def test_json_says_bytes_and_statuses(run: Run, tmp_path: Path) -> None:
    done = run("apply", MODEL, "--policy", "int8", "--out", tmp_path / "out", "--json")
    plan = narrowcast.plan(build(), "int8")
    assert done.json["bytes_before"] == 25472
    assert done.json["bytes_after"] == sum(row.bytes_after for row in plan)
    assert done.json["statuses"]["applied"] == 2
    assert done.json["out"] == str(tmp_path / "out")


def test_weights_that_cannot_be_quantized_leave_no_folder(run: Run, tmp_path: Path) -> None:
    done = run("apply", "tests.cli.models:with_nan", "--policy", "int8", "--out", tmp_path / "out")
    assert (done.status, done.out) == (1, "")
    assert "Layer '0' cannot carry 'int8_from_float32'" in done.err
    assert not (tmp_path / "out").exists()


def test_mode_that_is_not_carried_out_yet_exits_with_1(run: Run, tmp_path: Path) -> None:
    done = run("apply", MODEL, "--policy", "gptq/4/128", "--out", tmp_path / "out")
    assert (done.status, done.out) == (1, "")
    assert "Mode 'gptq' is not carried out on PyTorch yet" in done.err
    assert not (tmp_path / "out").exists()


def test_nothing_is_printed_to_standard_error(run: Run, tmp_path: Path) -> None:
    assert run("apply", MODEL, "--policy", "int8", "--out", tmp_path / "out").err == ""
