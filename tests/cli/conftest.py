from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowcast.cli.app import app

MODEL = "tests.cli.models:build"


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def run() -> Run:
    """Runs the command in this process, its streams apart and never a terminal."""

    def call(*arguments: object) -> Done:
        result = CliRunner().invoke(app, [str(a) for a in arguments], env={"NO_COLOR": "1", "COLUMNS": "160"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy file: int8 for every layer that can, but not for the last."""
    path = tmp_path / "policy.toml"
    path.write_text("narrowcast = 1\ndefault = 'keep'\n[rules]\n'.*' = 'int8'\n'3' = 'keep'\n", encoding="utf-8")
    return path
