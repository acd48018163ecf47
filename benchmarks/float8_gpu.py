"""Claim: on a GPU with float8 GEMMs a training step is faster than in bfloat16 and no slower than torchao's float8.

A stack of transformer blocks (hidden size 4096, 32 heads, sequences of 2048), forward, backward and AdamW: bfloat16,
narrowcast's recipes and torchao's at the same recipe, eager and compiled, all in turns in one process. Losses are
compared in the same run. Without such a GPU the script says so and ends.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast
from narrowcast.observe.latency import measure
from narrowcast.torch.float8_gemm import has_float8_gemm
from result import write

CLAIM = "A training step with real float8 GEMMs: faster than bfloat16, and no slower than torchao at the same recipe"
LAYERS = r"blocks/\d+/(qkv|mix|up|down)"
RECIPES = ("float8", "float8/current", "float8/rowwise", "float8/block")
PEERS = {"float8/current": "tensorwise", "float8/rowwise": "rowwise"}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, as in a decoder."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x`, shape `(batch, length, width)`, to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, num_blocks: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x`, shape `(batch, length, width)`, to the same shape."""
        result: Tensor = self.blocks(x)
        return result


def by_torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def stepper(model: nn.Module, x: Tensor, losses: list[float], *, compiled: bool) -> Callable[[], None]:
    """Makes what does one more step."""
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss = call(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not has_float8_gemm("cuda"):
        sys.exit("no float8 device: this benchmark needs an NVIDIA GPU of compute capability 8.9 or newer")
    torch.manual_seed(0)
    plain = Stack(options.blocks, options.width, 32).cuda().bfloat16()
    x = torch.randn(options.batch, 2048, options.width, device="cuda", dtype=torch.bfloat16)
    rows, medians = [], {}
    for compiled in (False, True):
        models = {"bfloat16": copy.deepcopy(plain)}
        for recipe in RECIPES:
            models[f"narrowcast {recipe}"] = narrowcast.apply(copy.deepcopy(plain), {LAYERS: recipe})
        for recipe in PEERS.values():
            models[f"torchao {recipe}"] = by_torchao(copy.deepcopy(plain), recipe)
        losses: dict[str, list[float]] = {name: [] for name in models}
        steps = {name: stepper(model, x, losses[name], compiled=compiled) for name, model in models.items()}
        found = measure(steps, num_rounds=options.rounds, budget_s=180, num_warmups=4)
        how = "compiled" if compiled else "eager"
        for name, latency in found.items():
            if abs(losses[name][0] / losses["bfloat16"][0] - 1) > 0.05:
                raise SystemExit(f"{name}: the loss is not that of bfloat16")
            medians[name, how] = latency.median_ms
            rows.append(
                {
                    "recipe": f"{name}, {how}",
                    "step": f"{latency.median_ms:.1f} ms",
                    "faster than bfloat16": f"{found['bfloat16'].median_ms / latency.median_ms:.2f} ×",
                }
            )
    holds = all(
        medians[f"narrowcast {ours}", how] <= min(1.02 * medians[f"torchao {theirs}", how], medians["bfloat16", how])
        for ours, theirs in PEERS.items()
        for how in ("compiled",)
    )
    notes = [f"{torch.cuda.get_device_name()}, {options.blocks} blocks, {options.batch} sequences of 2048."]
    write(__file__, claim=CLAIM, rows=rows, notes=notes, holds=holds)


if __name__ == "__main__":
    main()
