from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast
from tests.cli.conftest import MODEL, Run

ROOT = Path(__file__).parents[2]
VERBS = ("plan", "explain", "diff", "apply", "compare", "demo")


def test_version_is_printed_alone(run: Run) -> None:
    assert run("--version").out == narrowcast.__version__ + "\n"


def test_help_lists_every_verb(run: Run) -> None:
    done = run("--help")
    assert done.status == 0
    assert all(f" {verb} " in done.out for verb in VERBS)
    assert "Exit status: 0 done, 1 what was asked does not hold, 2 wrong usage." in done.out


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_and_json(run: Run, verb: str) -> None:
    done = run(verb, "--help")
    assert done.status == 0
    assert "--json" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("paln", MODEL),
        ("plan",),
        ("plan", MODEL, "--polcy", "int8"),
        ("explain", MODEL),
        ("explain", MODEL, "0"),
        ("diff", MODEL, "int8"),
        ("apply", MODEL, "--policy", "int8"),
        ("compare", MODEL, "folder"),
        ("plan", MODEL, "--fallback", "never"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert "Usage: " in done.err


def test_no_arguments_show_the_help(run: Run) -> None:
    done = run()
    assert "Usage: " in done.out + done.err


def test_module_runs_as_a_command_in_its_own_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "narrowcast", "apply", MODEL, "--policy", "int8", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "narrowcast.json").is_file()


def test_error_in_a_process_of_its_own_has_no_traceback() -> None:
    command = [sys.executable, "-m", "narrowcast", "plan", "no_such_module:build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_modules_of_the_current_folder_are_found_by_the_console_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef build(): return torch.nn.Linear(4, 4)\n", encoding="utf-8")
    script = Path(sys.executable).parent / "narrowcast"
    done = subprocess.run([script, "plan", "mine:build"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "weight 4×4 float32" in done.stdout


def test_without_torch_the_message_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; from narrowcast.cli import main; main()"
    command = [sys.executable, "-c", code, "plan", "tests.cli.models:build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "PyTorch is not installed. Run `pip install 'narrowcast[torch]'`." in done.stderr
    assert "Traceback" not in done.stderr
