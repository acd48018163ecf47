"""Writes the golden folder of the present format. Run once for a format version; what it wrote is never rewritten.

python -m tests.golden.make v1
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

import narrowcast
from tests.torch.models import ids, tiny_lm

HERE = Path(__file__).parent

MAP = {
    "embedding": "int8",
    r"blocks/\d+/(up|attention)": "int8",
    r"blocks/\d+/norm": "keep",
    "blocks/0/down": "int8/weight",
    "blocks/1/down": "int8_from_mixed_bfloat16",
    "blocks/0/scale": "mixed_bfloat16",
}


def main(version: str) -> None:
    """Saves a model that carries every mode of this format, with the outputs it had."""
    folder = HERE / version
    if folder.exists():
        sys.exit(f"{folder.name} stands already, and golden files are never rewritten")
    model = narrowcast.apply(tiny_lm(), MAP)
    narrowcast.save(model, folder)
    save_file({"ids": ids(), "outputs": model(ids()).detach()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
