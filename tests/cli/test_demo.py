from __future__ import annotations

import sys
from pathlib import Path

import pytest

from narrowcast.report import Check, Environment, Report
from tests.cli.conftest import Run


def _report(*, passed: bool) -> Report:
    environment = Environment("system", "processor", 2, 2, "3.11", ())
    return Report("Title", "Summary.", environment, checks=(Check("It holds", passed, "1", "1"),))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The job replaced by one that returns at once: `tests/demo` runs the real one."""
    import narrowcast.demo.job

    calls: dict[str, object] = {"passed": True}

    def run(out: Path, steps: object, *, budget_s: float) -> Report:
        calls.update(out=out, budget_s=budget_s)
        return _report(passed=bool(calls["passed"]))

    monkeypatch.setattr(narrowcast.demo.job, "run", run)
    return calls


def test_demo_that_holds_exits_with_0(run: Run, job: dict[str, object], tmp_path: Path) -> None:
    done = run("demo", "--out", tmp_path, "--budget", "2")
    assert done.status == 0
    assert "It holds" in done.out
    assert (job["out"], job["budget_s"]) == (tmp_path, 2.0)
    assert done.err == f"Wrote {tmp_path / 'report.html'}\n"


def test_demo_that_does_not_hold_exits_with_1(run: Run, job: dict[str, object], tmp_path: Path) -> None:
    job["passed"] = False
    done = run("demo", "--out", tmp_path)
    assert done.status == 1
    assert "error: a check failed" in done.err


def test_json_is_the_report(run: Run, job: dict[str, object], tmp_path: Path) -> None:
    assert run("demo", "--out", tmp_path, "--json").json == _report(passed=True).to_json()


def test_missing_packages_exit_with_1_and_say_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("demo", "--out", tmp_path)
    assert (done.status, done.out) == (1, "")
    assert "Run `pip install 'narrowcast[demo]' && pip install --no-deps" in done.err
