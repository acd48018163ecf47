"""Claim: first look-ups in a map of 1,000 regular-expression rules, 500 times faster than Keras.

Both maps hold the same rules and are asked for the same paths, in turns; no path is asked for twice. Rules and paths
are drawn anew in each run. Keras tries every rule at each look-up; here an index of literal text picks the few to try.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

from narrowcast import DTypePolicyMap
from result import write

CLAIM = "First look-ups in a map of 1,000 regular-expression rules, against Keras' `DTypePolicyMap`: 500 × faster"
WANTED = 500
NUM_RULES = 1000
NUM_ROUNDS = 9
NUM_PATHS = 10  # a round; Keras takes a tenth of a second for each
POLICIES = ("float16", "bfloat16", "float32", "mixed_bfloat16")

FORMS: dict[str, Callable[[int], str]] = {
    "`model/block17/layer/\\d+/.*`": lambda i: rf"model/block{i}/layer/\d+/.*",
    "`.*/unit17/[qkv]_proj`": lambda i: rf".*/unit{i}/[qkv]_proj",
    "half of each": lambda i: rf"model/block{i}/.*/norm\d" if i % 2 else rf".*/unit{i}/[qkv]_proj",
}


def paths(draw: random.Random, count: int) -> list[str]:
    """Paths of which most match one rule, and some none."""
    return [
        f"model/block{draw.randrange(NUM_RULES + 100)}/layer/{draw.randrange(10**6)}"
        f"/{draw.choice(['attn', 'mlp', 'x'])}/unit{draw.randrange(NUM_RULES + 100)}"
        f"/{draw.choice(['q_proj', 'v_proj', 'norm1'])}"
        for _ in range(count)
    ]


def seconds(look_up: Callable[[str], object], asked: list[str]) -> tuple[float, list[str]]:
    """Seconds a look-up, and the names of the policies found."""
    start = time.perf_counter()
    found = [look_up(path) for path in asked]
    return (time.perf_counter() - start) / len(asked), [policy.name for policy in found]


def measure(form: Callable[[int], str], draw: random.Random) -> tuple[float, float]:
    """Median seconds of a look-up: here and in Keras."""
    rules = {form(i): draw.choice(POLICIES) for i in draw.sample(range(NUM_RULES), NUM_RULES)}
    ours = DTypePolicyMap("float32", rules)
    theirs = keras.dtype_policies.DTypePolicyMap(keras.dtype_policies.DTypePolicy("float32"))
    for key, name in rules.items():
        theirs[key] = keras.dtype_policies.DTypePolicy(name)
    here, there = [], []
    for _ in range(NUM_ROUNDS):
        asked = paths(draw, NUM_PATHS)
        one, found = seconds(ours.__getitem__, asked)
        other, expected = seconds(theirs.__getitem__, asked)
        if found != expected:
            raise SystemExit(f"the maps disagree: {found} and {expected} at {asked}")
        here.append(one)
        there.append(other)
    return statistics.median(here), statistics.median(there)


def main() -> None:
    draw = random.Random()
    rows, ratios = [], []
    for name, form in FORMS.items():
        here, there = measure(form, draw)
        ratios.append(there / here)
        rows.append(
            {
                "rules": name,
                "narrowcast": f"{here * 1e6:.1f} µs",
                "Keras": f"{there * 1e6:,.0f} µs",
                "ratio": f"{there / here:,.0f} ×",
                "wanted": f"{WANTED} ×",
            }
        )
    write(__file__, claim=CLAIM, rows=rows, holds=min(ratios) >= WANTED, notes=["Median of one look-up of a new path."])


if __name__ == "__main__":
    main()
