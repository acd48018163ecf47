"""Claim: `import narrowcast` takes under 100 ms and loads neither NumPy nor a framework.

Each round starts fresh processes: one that imports narrowcast, and for comparison one that imports NumPy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from measure import note_if_busy
from result import write

CLAIM = "`import narrowcast` takes under 100 ms and loads neither NumPy nor a framework"
NUM_ROUNDS = 21
HEAVY = ("numpy", "torch", "jax", "keras")

CODE = """
import sys, time
start = time.perf_counter()
import {name}
print((time.perf_counter() - start) * 1000, *[heavy for heavy in {heavy!r} if heavy in sys.modules])
"""


def once(name: str) -> tuple[float, list[str]]:
    """Milliseconds of one import in a fresh process, and the heavy packages it loaded."""
    code = CODE.format(name=name, heavy=HEAVY)
    # As after an installation: modules compiled once, not in every process.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return float(words[0]), words[1:]


def main() -> None:
    names = ("narrowcast", "numpy", "narrowcast.torch")
    runs: dict[str, list[tuple[float, list[str]]]] = {name: [] for name in names}
    busy = note_if_busy()
    for name in names:
        once(name)  # compiles what is not compiled yet
    for _ in range(NUM_ROUNDS):
        for name in names:
            runs[name].append(once(name))
    medians = {name: statistics.median(ms for ms, _ in found) for name, found in runs.items()}
    loaded = runs["narrowcast"][0][1]
    write(
        __file__,
        claim=CLAIM,
        rows=[
            {
                "import": name,
                "median": f"{medians[name]:.1f} ms",
                "loads": ", ".join(runs[name][0][1]) or "nothing heavy",
                "wanted": "under 100 ms, nothing heavy" if name == "narrowcast" else "",
            }
            for name in names
        ],
        notes=busy,
        holds=medians["narrowcast"] < 100 and not loaded,
    )


if __name__ == "__main__":
    main()
