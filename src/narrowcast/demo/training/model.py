"""The model of the training run: a decoder-only transformer over characters, in plain PyTorch.

Nothing in it knows of precision, but for one rule that every mixed-precision model follows: scores and softmax of the
attention are computed in float32. Which layer computes in what is said by the recipe's policy map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "CharTransformer"]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a residual.

    Args:
        width: features of each character.
        num_heads: attention heads; divides `width`.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
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
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                # The two layers that write into the residual start smaller, as in GPT-2.
                is_residual = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * num_blocks) ** 0.5 if is_residual else 0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps int64 codes, shape `(windows, characters)`, to logits, shape `(windows, characters, num_characters)`."""
        places = torch.arange(codes.shape[1], device=codes.device)
        x = self.characters(codes) + self.positions(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
