"""Claim: a 6-layer transformer of these layers, in int8 on a CPU, is 10 × faster than the same model in Keras' int8.

Both models have the same weights (those of the Keras model, loaded) and are quantized by their own `quantize("int8")`;
Keras runs on PyTorch. They are measured in turns; codes of the weights are compared one by one, outputs by cosine.
Keras adds 1e-7 to the largest magnitude that it divides by, so a value on the edge between two codes may get the other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch import Tensor
from torch.nn import functional as F

from measure import note_if_busy
from narrowcast import saving
from narrowcast.layers import Sequential, TransformerBlock
from narrowcast.observe.latency import measure
from narrowcast.torch.cpu_kernels import has_dot_product
from result import write

CLAIM = "A 6-layer transformer in int8 on a CPU: 10 × faster than the same model in Keras' int8 (backend torch)"
WIDTH, HEADS, HIDDEN, NUM_BLOCKS, LENGTH = 384, 6, 1536, 6, 64
BATCHES = (1, 8)
NUM_THREADS = 2
WANTED = 10.0
MOST_ON_EDGES = 1e-3

_NAMES = ("attention_norm", "attention", "feedforward_norm", "up", "down")


def keras_model() -> Any:
    x = inputs = keras.Input((LENGTH, WIDTH))
    layers = keras.layers
    for number in range(NUM_BLOCKS):
        y = layers.LayerNormalization(epsilon=1e-5, name=f"attention_norm_{number}")(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{number}")(y, y)
        y = layers.LayerNormalization(epsilon=1e-5, name=f"feedforward_norm_{number}")(x)
        y = layers.Dense(HIDDEN, "relu", name=f"up_{number}")(y)
        x = x + layers.Dense(WIDTH, name=f"down_{number}")(y)
    return keras.Model(inputs, x)


def own_model(theirs: Any) -> Sequential:
    model = Sequential([TransformerBlock(HIDDEN, HEADS) for _ in range(NUM_BLOCKS)])
    model.build((None, LENGTH, WIDTH))
    rename = {f"{name}_{number}": f"{number}/{name}" for number in range(NUM_BLOCKS) for name in _NAMES}
    saving.load_keras_weights(model, theirs, rename=rename)
    return model.eval()


def inference(model: Callable[[Tensor], Any], x: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.inference_mode():
            return model(x)

    return call


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(NUM_THREADS)
    notes, rows, holds = note_if_busy(), [], True
    if not has_dot_product():
        notes.append(
            "This CPU has no 8-bit dot product (VNNI): exact 8-bit products take more multiplications than with one."
        )
    theirs = keras_model()
    ours, plain = own_model(theirs), own_model(theirs)
    theirs.quantize("int8")
    ours.quantize("int8")
    steps = torch.cat(
        [
            (ours[n].up.core.weight_codes.t().int() - theirs.get_layer(f"up_{n}")._kernel.value.int()).flatten()
            for n in range(NUM_BLOCKS)
        ]
    )
    same = bool(steps.abs().max() <= 1 and (steps != 0).float().mean() < MOST_ON_EDGES)
    for batch in BATCHES:
        x = torch.randn(batch, LENGTH, WIDTH)
        calls = {
            "Keras int8": inference(lambda y: theirs(y, training=False), x),
            "narrowcast int8": inference(ours, x),
            "narrowcast float32": inference(plain, x),
        }
        outputs = {name: torch.as_tensor(call()).flatten() for name, call in calls.items()}
        found = measure(calls, num_rounds=15, budget_s=90, num_warmups=1)
        ms = {name: latency.median_ms for name, latency in found.items()}
        ratio = ms["Keras int8"] / ms["narrowcast int8"]
        cosine = F.cosine_similarity(outputs["Keras int8"], outputs["narrowcast int8"], dim=0)
        holds = holds and ratio >= WANTED and float(cosine) > 0.999
        if ratio < WANTED:
            needed = ms["narrowcast float32"] / (ms["Keras int8"] / WANTED)
            notes.append(
                f"{batch} texts: {WANTED:g} × would take a model that is {needed:.1f} × as fast as in float32. Without "
                "a dot product, an instruction multiplies twice as many numbers of 8 bits as of 32, so products "
                "alone come to 2 × at most."
            )
        rows.append(
            {"texts of 64 tokens": batch}
            | {name: f"{value:.1f} ms" for name, value in ms.items()}
            | {"faster than Keras": f"{ratio:.1f} ×", "wanted": f"{WANTED:g} ×", "cosine": f"{cosine:.5f}"}
        )
    notes.append(f"Codes of the weights: {int((steps != 0).sum()):,} of {steps.numel():,} are one step apart.")
    write(__file__, claim=CLAIM, rows=rows, notes=notes, holds=holds and same, num_threads=NUM_THREADS)


if __name__ == "__main__":
    main()
