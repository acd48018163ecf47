from __future__ import annotations

from pathlib import Path

import narrowcast
from tests.cli.conftest import MODEL, Run
from tests.cli.models import build


def test_winner_and_loser_are_named(run: Run, policy: Path) -> None:
    done = run("explain", MODEL, "3", "--policy", policy)
    assert done.status == 0
    assert "'3'" in done.out
    assert "'.*'" in done.out


def test_json_is_what_the_library_explains(run: Run, policy: Path) -> None:
    expected = narrowcast.plan(build(), narrowcast.read_policy(policy)).explain("3").to_json()
    assert run("explain", MODEL, "3", "--policy", policy, "--json").json == expected


def test_unknown_path_exits_with_1_and_suggests_the_nearest(run: Run) -> None:
    done = run("explain", MODEL, "O", "--policy", "int8")
    assert (done.status, done.out) == (1, "")
    assert "Path 'O' is not in" in done.err


def test_the_root_is_explained_by_the_name_that_tables_give_it(run: Run) -> None:
    done = run("explain", MODEL, "(root)", "--policy", "int8")
    assert done.status == 0
    assert done.out.startswith("(root): container")


def test_a_policy_with_findings_is_explained_and_they_are_told(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    narrowcast.write_policy(narrowcast.DTypePolicyMap(None, {"3": "int8", "nowhere": "int8"}), file)
    done = run("explain", MODEL, "3", "--policy", file)
    assert done.status == 0
    assert "warning: Rule 'nowhere' matches no layer" in done.err
    assert "int8_from_float32" in done.out
