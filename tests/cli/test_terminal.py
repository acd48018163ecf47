from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console

from narrowcast.cli.terminal import Terminal, reports_errors
from narrowcast.errors import PlanError, TreeMismatchError


def test_work_shows_nothing_where_no_one_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(as_json=False).working("Loading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_work_is_shown_in_a_terminal() -> None:
    terminal = Terminal(as_json=False)
    terminal.err = Console(file=io.StringIO(), force_terminal=True)
    with terminal.working("Loading"):
        pass
    assert "Loading" in terminal.err.file.getvalue()  # type: ignore[attr-defined]


def test_step_of_a_long_job_is_named_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(as_json=True).step("Saving"):
        pass
    assert capsys.readouterr() == ("", "Saving\n")


def test_people_see_no_json_and_programs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json, expected in ((False, "text [not markup]\n"), (True, '{\n  "a": 1\n}\n')):
        terminal = Terminal(as_json=as_json)
        terminal.show("text [not markup]")
        terminal.data({"a": 1})
        assert capsys.readouterr() == (expected, "")


def test_json_is_never_invalid() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Terminal(as_json=True).data(float("nan"))


def test_every_finding_is_in_the_json_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    errors = (
        PlanError("Plan does not hold", findings=("one", "two")),
        TreeMismatchError("Trees differ", differences=("one", "two")),
    )
    for error in errors:

        @reports_errors
        def verb(*, as_json: bool, error: Exception = error) -> None:
            raise error

        with pytest.raises(typer.Exit) as caught:
            verb(as_json=True)
        assert caught.value.exit_code == 1
        out, err = capsys.readouterr()
        assert '"findings": [\n      "one",\n      "two"\n    ]' in out
        assert err.startswith("error: ")


def test_defect_is_not_hidden_as_an_error() -> None:
    @reports_errors
    def verb() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        verb()
