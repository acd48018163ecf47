from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import MODEL, Run


def test_only_layers_that_change_are_listed(run: Run, policy: Path) -> None:
    done = run("diff", MODEL, policy, "int8")
    assert done.status == 0
    paths = [line.split()[0] for line in done.out.splitlines() if line]
    assert "3" in paths
    assert "0" not in paths


def test_json_lists_the_same_layers(run: Run, policy: Path) -> None:
    done = run("diff", MODEL, policy, "int8", "--json")
    assert '"3"' in done.out
    assert '"0"' not in done.out
    assert done.json


def test_policy_against_itself_is_no_error(run: Run) -> None:
    assert run("diff", MODEL, "int8", "int8").status == 0
