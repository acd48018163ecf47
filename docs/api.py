"""Writes docs/api.md: the public names of narrowcast with the first sentence of each docstring.

`python docs/api.py` after a change to a public name; a test holds the page to what this writes.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import narrowcast

HEAD = """# Public names

What `import narrowcast` offers. Everything else may change without notice. `help(narrowcast.apply)` has the whole
docstring, with an example that runs.

| name | what it is |
|---|---|
"""


def text() -> str:
    """Returns the page's text."""
    return HEAD + "".join(f"| `{name}` | {_first_sentence(name)} |\n" for name in narrowcast.__all__)


def _first_sentence(name: str) -> str:
    value = getattr(narrowcast, name)
    if name == "__version__":
        return "The version, as text."
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    (Path(__file__).parent / "api.md").write_text(text(), encoding="utf-8")
