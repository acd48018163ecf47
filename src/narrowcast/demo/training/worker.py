"""What a training process runs: one recipe, one seed, each finished step as a line of JSON on standard output.

``python -m narrowcast.demo.training.worker`` can be killed at any moment; started again with the same folder it goes on
from the newest checkpoint there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from narrowcast.demo.training import corpus, recipe
from narrowcast.demo.training.loop import SIZES, Step, train

__all__ = ["from_line", "main", "to_line"]

_LOSSES = ("loss", "held_out_loss", "final_loss")


def to_line(step: Step) -> str:
    """Writes a step as a line of JSON. Losses are in hexadecimal, so that not a bit is lost.

    Example:
        >>> from_line(to_line(Step(1, 0.1, 0.5))) == Step(1, 0.1, 0.5)
        True
    """
    fields: dict[str, Any] = {name: getattr(step, name) for name in Step.__slots__}
    for name in _LOSSES:
        fields[name] = None if fields[name] is None else float(fields[name]).hex()
    return json.dumps(fields)


def from_line(line: str) -> Step:
    """Reads what `to_line` wrote."""
    fields = json.loads(line)
    for name in _LOSSES:
        fields[name] = None if fields[name] is None else float.fromhex(fields[name])
    return Step(**fields)


def main(arguments: list[str] | None = None) -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m narrowcast.demo.training.worker", description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints lie and are written")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    text, settings = corpus.read(given.corpus), SIZES[given.size]
    for step in train(recipe.find(given.recipe), settings, text, given.folder, seed=given.seed):
        sys.stdout.write(to_line(step) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
