"""Small models with everything that real ones have: ties, shared modules, custom parameters, buffers, attention."""

from __future__ import annotations

import torch
from torch import nn


class Scale(nn.Module):
    """A custom module with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.gain


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = Scale(width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.scale(self.down(torch.relu(self.up(self.norm(x)))))


class TinyLM(nn.Module):
    """A language model: ids `(batch, length)` to logits `(batch, length, vocabulary)`; head and embedding are tied."""

    def __init__(self, vocabulary: int = 40, width: int = 32, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) / self.temperature


class ConvNet(nn.Module):
    """Images `(batch, 3, 8, 8)` to logits `(batch, 10)`, with batch statistics and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = self.mix(self.mix(x))
        return self.head(x.mean((2, 3)))


def tiny_lm(seed: int = 0, **options) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**options).eval()


def conv_net(seed: int = 0) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet().eval()


def ids(batch: int = 2, length: int = 7, vocabulary: int = 40) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))
