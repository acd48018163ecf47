from __future__ import annotations

from pathlib import Path

import pytest

import narrowcast
from tests.cli.conftest import MODEL, Run
from tests.cli.models import build


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The policy of the other fixture without its exception."""
    path = tmp_path / "other.toml"
    path.write_text("narrowcast = 1\ndefault = 'keep'\n[rules]\n'.*' = 'int8'\n", encoding="utf-8")
    return path


def test_only_layers_that_change_are_listed(run: Run, policy: Path, other: Path) -> None:
    done = run("diff", MODEL, policy, other)
    assert done.status == 0
    paths = [line.split()[0] for line in done.out.splitlines() if line]
    assert "3" in paths
    assert "0" not in paths


def test_json_is_what_the_library_finds(run: Run, policy: Path, other: Path) -> None:
    one, two = (narrowcast.plan(build(), narrowcast.read_policy(path)) for path in (policy, other))
    data = run("diff", MODEL, policy, other, "--json").json
    assert data == one.diff(two).to_json()
    assert [site["path"] for site in data["sites"]] == ["3"]


def test_policy_against_itself_is_no_error(run: Run) -> None:
    assert run("diff", MODEL, "int8", "int8").status == 0
