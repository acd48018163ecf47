"""Models and inputs that the tests of the command line name by address."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build() -> nn.Module:
    """Two linear layers and a norm, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32))


def build_at_random() -> nn.Module:
    """The same architecture with weights that no seed decides."""
    model = build()
    torch.seed()
    return nn.Sequential(*(type(layer)(*_sizes(layer)) for layer in model))


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return (64,) if isinstance(layer, nn.LayerNorm) else ()


def with_nan() -> nn.Module:
    """The same with a weight that cannot be quantized."""
    model = build()
    nn.init.constant_(model[0].weight, float("nan"))
    return model


def batches() -> list[Tensor]:
    """Two batches, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 64, generator=generator) for _ in range(2)]


def batches_of_nan() -> Tensor:
    """A batch after which no output is finite."""
    return torch.full((2, 64), float("nan"))


def batches_of_words() -> list[str]:
    """What no model takes."""
    return ["a", "b"]


def failing() -> object:
    """A callable that raises."""
    raise OSError("the disk is gone")


NOT_CALLABLE = 3
