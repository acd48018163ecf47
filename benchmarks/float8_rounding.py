"""Claim: rounding to float8 by adding and subtracting is faster than casting there and back, and gives the same values.

Four million float32 values, scaled, clipped, rounded and back in float32, eager: this library's form, PyTorch's casts,
and ml_dtypes' casts in NumPy. The values are compared in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

from measure import note_if_busy
from narrowcast.observe.latency import measure
from narrowcast.torch.float8_rounding import FORWARD, GRADIENT, Format, round_to
from result import write

CLAIM = "Rounding float32 to float8 values, eager: at least 1.5 × faster than casting to e4m3 and back"
WANTED = 1.5
NUM_VALUES = 4 * 2**20


def by_casts(x: torch.Tensor, scale: torch.Tensor, to: Format) -> torch.Tensor:
    return (x * scale).clamp_(-to.largest, to.largest).to(to.dtype).float()


def by_ml_dtypes(x: np.ndarray, scale: np.float32, to: Format) -> np.ndarray:
    dtype = getattr(ml_dtypes, str(to.dtype).removeprefix("torch."))
    return np.clip(x * scale, -to.largest, to.largest).astype(dtype).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    scale = torch.tensor(100.0)
    x = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0))
    array = x.numpy()
    rows, holds = [], True
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for to in (FORWARD, GRADIENT):
            calls: dict[str, Callable[[], object]] = {
                "narrowcast": lambda to=to: round_to(x, scale, to),
                "casts": lambda to=to: by_casts(x, scale, to),
            }
            if num_threads == 1:
                calls["ml_dtypes"] = lambda to=to: by_ml_dtypes(array, np.float32(100.0), to)
            results = [np.asarray(call()) for call in calls.values()]
            if not all(np.array_equal(result, results[0]) for result in results):
                raise SystemExit("the values differ")
            found = measure(calls, num_rounds=options.rounds, budget_s=30)
            ours = found["narrowcast"].median_ms
            if to is FORWARD:
                holds = holds and found["casts"].median_ms / ours >= WANTED
            rows += [
                {
                    "dtype, threads, by": f"{to.dtype}, {num_threads}, {name}".removeprefix("torch."),
                    "million values a second": f"{NUM_VALUES / latency.median_ms / 1e3:.0f}",
                    "narrowcast is faster": f"{latency.median_ms / ours:.2f} ×",
                }
                for name, latency in found.items()
            ]
    write(__file__, claim=CLAIM, rows=rows, holds=holds, notes=note_if_busy(), num_threads=2)


if __name__ == "__main__":
    main()
