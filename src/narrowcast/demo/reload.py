"""What the demo runs in a new process: load a saved encoder, embed the documents, write the embeddings to a file.

``python -m narrowcast.demo.reload FOLDER EMBEDDINGS`` knows nothing of the process that saved: the architecture comes
from its own source, with random weights, and everything else from the folder.
"""

from __future__ import annotations

import sys

from safetensors.torch import save_file

from narrowcast import frameworks
from narrowcast.demo.encoder import Encoder, documents

__all__ = ["main"]


def main(folder: str, embeddings: str) -> None:
    """Loads the model saved in `folder`, and writes the documents' embeddings to the safetensors file `embeddings`."""
    encoder = Encoder(trained=False)
    frameworks.load(encoder.model, folder)
    save_file({"embeddings": encoder.embed(documents())}, embeddings)


if __name__ == "__main__":
    main(*sys.argv[1:])
