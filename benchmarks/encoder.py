"""Claim: a real sentence encoder runs faster in int8 than in float32, in bfloat16 and by torchao, eager and compiled.

MiniLM-L6 (22.7 million parameters) on 1 text of 32 tokens and 32 texts of 64 tokens, random tokens, no padding. All
variants run in turns in one process; each compiled one is compiled for the shape it is measured on. The map is the
demo's. Variants in bfloat16 convert the whole model; narrowcast's int8 is measured on it as well, and then computes its
int8 layers' outputs in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from measure import note_if_busy
from narrowcast import frameworks
from narrowcast.demo.encoder import Encoder
from narrowcast.demo.job import demo_policy
from narrowcast.observe.latency import measure
from result import write

CLAIM = (
    "A sentence encoder in int8: 1.5 × (1 text) and 1.6 × (32 texts) faster than float32 eager; "
    "compiled 2 ×, and no slower than torchao or bfloat16 compiled"
)
SHAPES = {"1 × 32 tokens": (1, 32), "32 × 64 tokens": (32, 64)}
WANTED = {
    ("int8 eager", "float32 eager", "1 × 32 tokens"): 1.5,
    ("int8 eager", "float32 eager", "32 × 64 tokens"): 1.6,
    **{("int8 compiled", "float32 eager", shape): 2.0 for shape in SHAPES},
    **{("int8 compiled", "torchao int8 compiled", shape): 1.0 for shape in SHAPES},
    **{("int8 compiled", "bfloat16 compiled", shape): 1.0 for shape in SHAPES},
}


def torchao_int8(model: nn.Module) -> nn.Module:
    """The same layers' worth by torchao: every linear layer, per-token activations, weights by output channel."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def variants(model: nn.Module) -> dict[str, nn.Module]:
    """Every eager model, each made from a copy of the trained float32 one."""

    def ours(model: nn.Module) -> nn.Module:
        return frameworks.apply(model, demo_policy())

    return {
        "float32 eager": copy.deepcopy(model),
        "bfloat16 eager": copy.deepcopy(model).bfloat16(),
        "torchao int8 eager": torchao_int8(copy.deepcopy(model)),
        "int8 eager": ours(copy.deepcopy(model)),
        "int8 on bfloat16 eager": ours(copy.deepcopy(model).bfloat16()),
    }


def call(model: Callable[..., object], inputs: dict[str, Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return model(**inputs)

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--no-compile", action="store_true", help="measure the eager variants only")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)

    busy = note_if_busy()
    encoder = Encoder()
    eager = variants(encoder.model)
    medians: dict[str, dict[str, float]] = {}
    for shape, (num_texts, num_tokens) in SHAPES.items():
        tokens = torch.randint(1000, 30000, (num_texts, num_tokens))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        models: dict[str, Callable[..., object]] = dict(eager)
        if not options.no_compile:
            torch.compiler.reset()
            for name in ("float32", "bfloat16", "torchao int8", "int8", "int8 on bfloat16"):
                models[f"{name} compiled"] = torch.compile(eager[f"{name} eager"], dynamic=False)
        found = measure(
            {name: call(model, inputs) for name, model in models.items()},
            num_rounds=options.rounds * (4 if num_texts == 1 else 1),
            budget_s=150,
            num_warmups=1,
        )
        for name, latency in found.items():
            medians.setdefault(name, {})[shape] = latency.median_ms

    holds = True
    notes = []
    for (name, peer, shape), wanted in WANTED.items():
        if name not in medians or peer not in medians:
            continue
        ratio = medians[peer][shape] / medians[name][shape]
        holds = holds and ratio >= wanted
        notes.append(
            f"{name} against {peer}, {shape}: {ratio:.2f} × faster, wanted {wanted} ×"
            + ("" if ratio >= wanted else " (not reached)")
        )
    float32 = medians["float32 eager"]
    write(
        __file__,
        claim=CLAIM,
        rows=[
            {"encoder": name}
            | {f"{shape}, ms": f"{medians[name][shape]:.1f}" for shape in SHAPES}
            | {f"{shape}, × of float32": f"{float32[shape] / medians[name][shape]:.2f}" for shape in SHAPES}
            for name in medians
        ],
        notes=[*notes, *busy],
        holds=holds,
        num_threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
