"""Writes the results of all benchmarks, benchmarks/results/*.json, into docs/benchmarks.md.

`python benchmarks/table.py` writes the page, `--list` prints the names of the benchmarks in the order of the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def names() -> list[str]:
    """The benchmarks that have a result, or could have one: every script here that says what it claims."""
    return sorted(
        path.stem for path in HERE.glob("*.py") if re.search(r"^CLAIM\b", path.read_text("utf-8"), re.MULTILINE)
    )


def section(result: dict[str, Any], name: str) -> str:
    """One benchmark as Markdown."""
    lines = [f"### {result['claim']}", ""]
    columns = list(result["rows"][0])
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|" + "|".join("---" if index == 0 else "---:" for index in range(len(columns))) + "|")
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in result["rows"]]
    lines += ["", *(f"{note}\n" for note in result.get("notes", []))]
    environment = result["environment"]
    packages = ", ".join(f"{package} {version}" for package, version in environment["packages"].items())
    lines.append(
        f"<small>`python benchmarks/{name}.py` on {environment['processor']}, {environment['num_threads']} threads, "
        f"Python {environment['python']}, {packages}</small>"
    )
    return "\n".join(lines) + "\n"


def results() -> str:
    """All sections, in the order of `names`."""
    found = []
    for name in names():
        path = HERE / "results" / f"{name}.json"
        if path.is_file():
            found.append(section(json.loads(path.read_text("utf-8")), name))
        else:
            found.append(f"### {name}\n\nNot measured yet: `python benchmarks/{name}.py`.\n")
    return "\n".join(found)


def page(text: str) -> str:
    """The page's text with everything between the two marks replaced."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n\n{results()}\n{text[end:]}"


if __name__ == "__main__":
    if "--list" in sys.argv[1:]:
        print("\n".join(names()))
    else:
        PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(HERE.parent)}")
