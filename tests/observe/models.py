"""A small model and its training, for the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import narrowcast


class Net(nn.Module):
    """A norm between two linear layers; `body` may be called several times."""

    def __init__(self, width: int = 32, uses: int = 1) -> None:
        super().__init__()
        self.uses = uses
        self.body = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.relu(self.body(x))
        return self.head(self.norm(x))


def net(policy: object = "mixed_bfloat16", *, uses: int = 1, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return narrowcast.apply(Net(uses=uses), policy)


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Trains by plain SGD and returns the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
