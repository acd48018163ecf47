"""Checkpoints of a training run, written to be copied.

`narrowcast.save` writes the model with its policies and all state of float8 (scales, histories); beside it stands one
file with what torch's own objects say about themselves. A checkpoint appears under its final name only when it is
complete, so a killed run leaves the one before, never half a one. Reading runs no code: `weights_only=True`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import narrowcast

__all__ = ["Stateful", "newest", "restore", "save"]

_PREFIX = "step-"


class Stateful(Protocol):
    """An optimizer, a schedule, a loss scaler: what says its own state and takes it back."""

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes back what `state_dict` returned."""
        ...


def save(folder: Path, *, step: int, model: nn.Module, state: Mapping[str, Stateful], num_kept: int = 2) -> Path:
    """Writes a checkpoint between two optimizer steps and deletes old ones.

    Args:
        folder: where the run's checkpoints lie; made if missing.
        step: how many steps are done.
        model: the model.
        state: by name, everything else that the next step depends on.
        num_kept: how many checkpoints stay, the new one among them.

    Returns:
        The checkpoint's folder.
    """
    target = folder / f"{_PREFIX}{step:06d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    narrowcast.save(model, partial / "model")
    torch.save({"step": step, **{name: part.state_dict() for name, part in state.items()}}, partial / "training.pt")
    partial.rename(target)
    for old in _all(folder)[:-num_kept]:
        shutil.rmtree(old)
    return target


def newest(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in `folder`, or `None`."""
    return next(reversed(_all(folder)), None)


def restore(checkpoint: Path, state: Mapping[str, Stateful]) -> int:
    """Gives everything but the model its state back; the model's own comes by `narrowcast.load(model, checkpoint /
    "model")`.

    Args:
        checkpoint: the checkpoint's folder.
        state: by the names they were saved under. The optimizer must be made after the model was loaded.

    Returns:
        How many steps were done.
    """
    saved = torch.load(checkpoint / "training.pt", weights_only=True)
    for name, part in state.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob(_PREFIX + "*"))
