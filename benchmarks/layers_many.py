"""Claim: 10,000 layers are built, walked, saved and loaded in under 30 seconds, in time linear in their number."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import narrowcast
from measure import note_if_busy
from narrowcast.layers import Dense, Sequential
from result import write

CLAIM = "10,000 layers built, walked, saved and loaded: linear in their number, under 30 s"
NUM_LAYERS = (2_500, 5_000, 10_000)
MOST_S = 30.0
LINEAR_WITHIN = 1.3  # how much more a layer of the largest model may cost than one of the smallest


def timed(times: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = call()
    times[name] = time.perf_counter() - begin
    return result


def build(num_layers: int) -> Sequential:
    model = Sequential([Dense(4) for _ in range(num_layers)])
    model.build((None, 4))
    return model


def once(num_layers: int) -> dict[str, float]:
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = timed(times, "build", lambda: build(num_layers))
        timed(times, "walk", lambda: (narrowcast.tree(model), [layer.path for layer in model._flatten_layers()]))
        timed(times, "save", lambda: narrowcast.save(model, folder))
        again = timed(times, "load", lambda: narrowcast.load(folder))
    first, last = (model[0], again[0]), (model[num_layers - 1], again[num_layers - 1])
    if not all(torch.equal(a.kernel, b.kernel) for a, b in (first, last)):
        raise RuntimeError("what was loaded is not what was saved")
    return times


def main() -> None:
    torch.set_num_threads(1)
    notes = note_if_busy()
    once(500)  # what is imported and cached at first use
    found = {num_layers: once(num_layers) for num_layers in NUM_LAYERS}
    rows = [
        {"layers": f"{num_layers:,}"}
        | {name: f"{seconds:.2f} s" for name, seconds in times.items()}
        | {"in all": f"{sum(times.values()):.2f} s", "a layer": f"{sum(times.values()) / num_layers * 1e3:.2f} ms"}
        for num_layers, times in found.items()
    ]
    each = {num_layers: sum(times.values()) / num_layers for num_layers, times in found.items()}
    growth = each[NUM_LAYERS[-1]] / each[NUM_LAYERS[0]]
    total = sum(found[NUM_LAYERS[-1]].values())
    notes.append(
        f"A layer of the largest model costs {growth:.2f} × one of the smallest, wanted {LINEAR_WITHIN} × at most."
    )
    write(__file__, claim=CLAIM, rows=rows, notes=notes, holds=total < MOST_S and growth <= LINEAR_WITHIN)


if __name__ == "__main__":
    main()
