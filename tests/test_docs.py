"""Every example in Markdown runs: the Python blocks of a page in order, in one namespace and in an empty folder."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
PAGES = [
    path.relative_to(ROOT)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
]


def _blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of its first line."""
    text = (ROOT / page).read_text("utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, source in _blocks(page, "python"):
        # As many lines before as in the page, so that a traceback names the page's own line.
        exec(compile("\n" * (line - 1) + source, str(ROOT / page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_toml_of_the_page_is_toml(page: Path) -> None:
    for _, source in _blocks(page, "toml"):
        tomllib.loads(source)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_policy_files_of_the_page_can_be_read(page: Path) -> None:
    from narrowcast.dtype_policies import files

    for _, source in _blocks(page, "toml"):
        if source.lstrip().startswith(("narrowcast =", "#")):
            assert files.loads(source) is not None


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_commands_on_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.cli.app import app

    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    lines = [
        line
        for _, source in _blocks(Path(page), "console")
        for line in re.findall(r"^\$ narrowcast (.*)$", source, re.M)
    ]
    ran = [shlex.split(line, comments=True) for line in lines if "examples." in line]
    assert len(ran) >= 5
    for words in ran:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"narrowcast {shlex.join(words)}: {done.output}"


def test_map_of_the_example_is_the_one_on_the_page() -> None:
    assert (ROOT / "examples" / "policy.toml").read_text("utf-8") in [
        s for _, s in _blocks(Path("docs/cli.md"), "toml")
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_of_the_page_exist_with_their_options(page: Path) -> None:
    from narrowcast.cli.app import app

    for _, source in _blocks(page, "console"):
        for line in re.findall(r"^\$ narrowcast (.*)$", source, re.MULTILINE):
            words = shlex.split(line, comments=True)
            if words[0].startswith("-"):
                continue
            shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
            assert shown.exit_code == 0, line
            for option in (word for word in words[1:] if word.startswith("-")):
                assert option in shown.output, f"{page}: no {option} in narrowcast {words[0]}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / page.parent / target).exists(), target
