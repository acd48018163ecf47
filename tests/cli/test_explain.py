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
