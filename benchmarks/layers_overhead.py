"""Claim: a `Dense` layer costs at most 25 µs a call over `nn.Linear`, and nothing under `torch.compile`.

One row of 384 inputs and 384 outputs, eager and compiled, with and without gradients; both layers have the same
weights, and their outputs are compared bit by bit. What a module around `nn.Linear` costs that only calls it is
measured too: `torch.compile` checks at each call what it read while it traced, and reads more of two modules than of
one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from measure import note_if_busy
from narrowcast.layers import Dense
from narrowcast.observe.latency import measure
from result import write

CLAIM = "A `Dense` call takes at most 25 µs more than `nn.Linear`, 1×384×384, eager; no more under `torch.compile`"
WIDTH = 384
CALLS_IN_ONE = 200
MOST_US = 25.0
SAME_WITHIN = 0.05  # what two compiled calls of the same graph differ by from run to run, as a share


class Around(nn.Module):
    """The least that a layer with a core can be."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the core returns."""
        result: Tensor = self.core(x)
        return result


def repeated(layer: Callable[[Tensor], Tensor], x: Tensor, *, gradients: bool) -> Callable[[], object]:
    def call() -> None:
        with torch.set_grad_enabled(gradients):
            for _ in range(CALLS_IN_ONE):
                layer(x)

    return call


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    notes = note_if_busy()
    linear, dense = nn.Linear(WIDTH, WIDTH), Dense(WIDTH)
    dense.build((None, WIDTH))
    dense.core.load_state_dict(linear.state_dict())
    x = torch.randn(1, WIDTH)
    same = torch.equal(dense(x), linear(x))
    rows, holds = [], same
    variants = {
        "eager": {"nn.Linear": linear, "module around": Around(linear), "Dense": dense},
        "compiled": {
            "nn.Linear": torch.compile(linear),
            "module around": torch.compile(Around(linear)),
            "Dense": torch.compile(dense),
        },
    }
    for name, layers in variants.items():
        for gradients in (False, True):
            calls = {peer: repeated(layer, x, gradients=gradients) for peer, layer in layers.items()}
            found = measure(calls, num_rounds=100, budget_s=20, num_warmups=3)
            us = {peer: latency.median_ms * 1000 / CALLS_IN_ONE for peer, latency in found.items()}
            over = us["Dense"] - us["nn.Linear"]
            most = MOST_US if name == "eager" else SAME_WITHIN * us["nn.Linear"]
            holds = holds and over <= most
            rows.append(
                {
                    "call": f"{name}, {'with' if gradients else 'without'} gradients",
                    "nn.Linear": f"{us['nn.Linear']:.1f} µs",
                    "a module around it": f"{us['module around']:.1f} µs",
                    "Dense": f"{us['Dense']:.1f} µs",
                    "more": f"{over:+.1f} µs",
                    "wanted": f"at most {most:.1f} µs",
                }
            )
    notes.append(f"Outputs are {'the same bits' if same else 'DIFFERENT'}.")
    write(__file__, claim=CLAIM, rows=rows, notes=notes, holds=holds)


if __name__ == "__main__":
    main()
