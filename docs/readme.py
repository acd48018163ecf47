"""Puts the demo's real output into README.md: `python docs/readme.py`, best on an idle machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- demo output: begin -->", "<!-- demo output: end -->"


def output() -> str:
    """Runs the demo and returns what it prints."""
    command = [sys.executable, "-m", "narrowcast", "demo", "--out", str(ROOT / "demo-output")]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # as wide as it needs
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def page(text: str, shown: str) -> str:
    """Returns the README's text with everything between the two marks replaced."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n```text\n{shown.strip()}\n```\n{text[end:]}"


if __name__ == "__main__":
    README.write_text(page(README.read_text("utf-8"), output()), encoding="utf-8")
