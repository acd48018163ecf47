"""What the page "Coming from Keras" says is printed is what its blocks print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.torch.layers.peer import keras

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-keras.md"


def test_blocks_print_what_the_page_says(tmp_path, monkeypatch):
    assert keras.backend.backend() == "torch"
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)
    assert len([output for _, output in blocks if output]) >= 8
    namespace: dict[str, object] = {"__name__": "__page__"}
    for source, output in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, str(PAGE), "exec"), namespace)
        assert printed.getvalue() == output
