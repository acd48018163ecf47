"""A small model and inputs for it, as the command line wants them: callables that take no arguments.

From the root of the repository::

    narrowcast plan examples.small_model:build
    narrowcast plan examples.small_model:build --policy examples/policy.toml
    narrowcast apply examples.small_model:build --policy examples/policy.toml --out quantized
    narrowcast compare examples.small_model:build quantized --inputs examples.small_model:batches
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block: widen, bend, narrow, add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(rows, width)` in and out."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Four blocks and a head of ten classes."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(rows, width)` in, `(rows, 10)` out."""
        return self.head(self.blocks(x))


def build() -> nn.Module:
    """Returns the model, with the same weights each time."""
    torch.manual_seed(0)
    return Net().eval()


def batches() -> list[Tensor]:
    """Returns four batches of 32 rows."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 256, generator=generator) for _ in range(4)]
