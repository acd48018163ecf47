"""The model of the training run: a decoder-only transformer over characters, in plain PyTorch.

Nothing in it knows of precision, but for one rule that every mixed-precision model follows: scores and softmax of the
attention are computed in float32. Which layer computes in what is said by the recipe's policy map.

References:
    Press, Smith, Lewis, Train Short, Test Long, 2022: positions as a bias that grows with the distance. A model that
    sees neighbours first learns to spell in some hundred steps, where learned positions take a thousand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "CharTransformer"]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a residual.

    Args:
        width: features of each character.
        num_heads: attention heads; divides `width`.
        context: the most characters in a window.
    """

    bias: Tensor

    def __init__(self, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.register_buffer("bias", _distance_bias(num_heads, context), persistent=False)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x`, shape `(windows, characters, width)`, to the same shape and dtype."""
        num_windows, length, width = x.shape
        heads = (num_windows, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4).float()
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:, :length, :length])
        x = x + self.mix(attended.transpose(1, 2).reshape(num_windows, length, width))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


class CharTransformer(nn.Module):
    """Predicts the next character.

    Args:
        num_characters: how many different characters there are.
        context: the most characters in a window.
        width: features of each character.
        num_heads: attention heads.
        num_blocks: blocks.

    Example:
        >>> model = CharTransformer(84, context=64, width=32, num_heads=2, num_blocks=2)
        >>> model(torch.zeros(3, 64, dtype=torch.int64)).shape
        torch.Size([3, 64, 84])
    """

    def __init__(self, num_characters: int, *, context: int, width: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads, context) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                # The two layers that write into the residual start smaller, so that depth does not add up.
                is_residual = name.endswith(("mix.weight", "down.weight"))
                shrink = (2 * num_blocks) ** -0.5 if is_residual else 1.0
                nn.init.normal_(parameter, std=shrink * parameter.shape[1] ** -0.5)
        nn.init.normal_(self.characters.weight)
        nn.init.normal_(self.head.weight, std=0.5 * width**-0.5)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps int64 codes, shape `(windows, characters)`, to logits, shape `(windows, characters, num_characters)`."""
        logits: Tensor = self.head(self.norm(self.blocks(self.characters(codes))))
        return logits


def _distance_bias(num_heads: int, context: int) -> Tensor:
    """What is added to scores, shape `(heads, context, context)`: less for what is far, -inf for what follows."""
    places = torch.arange(context)
    distances = (places[:, None] - places[None, :]).float()
    slopes = torch.tensor([2.0 ** (-8 * head / num_heads) for head in range(num_heads)])
    return torch.where(distances < 0, -math.inf, -slopes[:, None, None] * distances)
