"""What every timing of kernels needs: whether the machine is idle, and calls that meet cold weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["cycled", "idle_share", "note_if_busy"]


def idle_share(seconds: float = 0.5) -> float:
    """Returns the share of the processors' time that was idle during the next `seconds`; 1.0 where nothing tells it."""

    def read() -> tuple[int, int] | None:
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        ticks = [int(field) for field in fields]
        return ticks[3] + ticks[4], sum(ticks)  # idle and waiting for disks

    before = read()
    time.sleep(seconds)
    after = read()
    if before is None or after is None or after[1] == before[1]:
        return 1.0
    return (after[0] - before[0]) / (after[1] - before[1])


def note_if_busy(least: float = 0.95) -> list[str]:
    """Returns a sentence for the result where something else is running: two threads then wait for each other."""
    share = idle_share()
    if share >= least:
        return []
    return [f"Measured while the machine was only {share:.0%} idle: times are too long, and ratios are not reliable."]


def cycled(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Returns a call that makes each of `calls` in turn, so that each finds its weights out of the caches."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()
