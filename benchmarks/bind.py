"""Claim: 100,000 sites are bound under 1,000 rules, half of them `.*...`, in under 5 s, linear in sites.

The tree is made of records, as a model of that size would give it; PyTorch's own carrier judges each site. Every plan
is checked against trying all rules by `re.fullmatch` on a sample of its sites. Names are drawn anew in each run.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable

from narrowcast import DTypePolicyMap
from narrowcast.plan import Member, Parameter, Plan, Site, Tree
from narrowcast.plan.bind import bind
from narrowcast.torch.carrier import TorchCarrier
from result import write

CLAIM = (
    "Binding 100,000 sites under 1,000 rules, half of them beginning with `.*`: under 5 s on one core, linear in sites"
)
WANTED_SECONDS = 5.0
MAX_GROWTH = 1.3  # of the time a site takes, from a quarter of the sites to all; 1 is linear
SIZES = (25_000, 50_000, 100_000)
NUM_ROUNDS = 3
NUM_CHECKED = 200

MIXES: dict[str, Callable[[int, str], str]] = {
    "half `model/b17/.*`, half `.*/u17/[qkv]_proj`": lambda i, tag: (
        rf"model/{tag}b{i % 500}/.*" if i < 500 else rf".*/{tag}u{i - 500}/(q|k|v)_proj"
    ),
    "distinct beginnings": lambda i, tag: rf"model/{tag}b{i}/stage/\d+/.*",
    "four mixed forms": lambda i, tag: (
        rf"model/{tag}b{i}/.*",
        rf".*/layer/{i}/(attn|mlp)/.*_proj",
        rf".*{tag}b{i}/.*",
        rf".*/(attn|mlp)/.*{tag}u{i}/[qkv]_proj",
    )[i % 4],
    "`.*/17/[am].*/.*_proj`": lambda i, tag: rf".*/{i}/[am].*/.*_proj",
}


def tree(num_sites: int, tag: str) -> Tree:
    """Linear layers, and every fifth a norm, each with a number of its own; of a thousand other numbers each occurs."""
    weight = (Parameter("weight", (256, 256), "float32"), Parameter("bias", (256,), "float32"))
    gain = (Parameter("weight", (256,), "float32"),)
    sites = [Site((Member(("",), "container", "Model"),))]
    for i in range(num_sites - 1):
        part = "attn" if i % 2 else "mlp"
        prefix = f"model/{tag}b{i % 1000}/stage/{i}/layer/{i // 7 % 1000}/{part}/{tag}u{i // 3 % 1000}"
        if i % 5:
            sites.append(Site((Member((f"{prefix}/{'qkv'[i % 3]}_proj",), "linear", "Linear", weight),), "cpu"))
        else:
            sites.append(Site((Member((f"{prefix}/norm",), "norm", "LayerNorm", gain),), "cpu"))
    return Tree(tuple(sites), "torch", "Model")


def check(plan: Plan, rules: list[str], draw: random.Random) -> None:
    """Compares a sample of rows with trying every rule."""
    compiled = {rule: re.compile(rule) for rule in rules}
    for row in draw.sample(plan.rows, NUM_CHECKED):
        expected = [rule for rule, expression in compiled.items() if expression.fullmatch(row.path)]
        found = [*([row.rule] if row.rule is not None else []), *(loser.rule for loser in row.losers)]
        if found != expected:
            raise SystemExit(f"{row.path}: {found} instead of {expected}")


def main() -> None:
    draw = random.Random()
    rows, holds = [], True
    for name, form in MIXES.items():
        times: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(NUM_ROUNDS):
            tag = "".join(draw.choices("abcdefgh", k=3))
            rules = [form(i, tag) for i in draw.sample(range(1000), 1000)]
            policies = DTypePolicyMap(None, dict.fromkeys(rules, "int8"))
            for size in SIZES:
                sites = tree(size, tag)
                start = time.perf_counter()
                plan = bind(sites, policies, TorchCarrier(), strict=False)
                times[size].append(time.perf_counter() - start)
                check(plan, rules, draw)
        medians = {size: statistics.median(found) for size, found in times.items()}
        growth = medians[SIZES[-1]] / SIZES[-1] / (medians[SIZES[0]] / SIZES[0])
        holds = holds and medians[SIZES[-1]] < WANTED_SECONDS and growth < MAX_GROWTH
        rows.append(
            {
                "rules": name,
                **{f"{size:,} sites": f"{seconds:.2f} s" for size, seconds in medians.items()},
                "a site": f"{medians[SIZES[-1]] / SIZES[-1] * 1e6:.0f} µs",
                "growth": f"{growth:.2f}",
                "wanted": f"under {WANTED_SECONDS:.0f} s, {MAX_GROWTH}",
            }
        )
    write(
        __file__,
        claim=CLAIM,
        rows=rows,
        holds=holds,
        notes=["Growth: the time of a site at the most sites, over that at the fewest."],
    )


if __name__ == "__main__":
    main()
