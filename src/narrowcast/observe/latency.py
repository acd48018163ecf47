"""Times of two or more things, taken in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from narrowcast.report.records import Latency

__all__ = ["measure"]


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    num_rounds: int = 30,
    budget_s: float = 10.0,
    num_warmups: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Latency]:
    """Measures each of `calls`, one call of each in every round, in an order that turns round by round.

    Args:
        calls: what to measure, by name.
        num_rounds: the most rounds; at least 3 are measured, whatever they take.
        budget_s: no round starts after this many seconds. Bounds what a slow model costs.
        num_warmups: unmeasured calls of each before, for lazy initialisation and caches.
        clock: gives the time in seconds.

    Example:
        >>> ticks = iter(range(100))
        >>> measure({"a": lambda: None}, num_rounds=3, clock=lambda: float(next(ticks)))["a"].median_ms
        1000.0
    """
    for call in calls.values():
        for _ in range(num_warmups):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    begin = clock()
    for number in range(max(num_rounds, 3)):
        if number >= 3 and clock() - begin > budget_s:
            break
        for name in order:
            start = clock()
            calls[name]()
            samples[name].append((clock() - start) * 1000)
        order = order[1:] + order[:1]
    return {name: Latency(statistics.median(times), min(times), len(times)) for name, times in samples.items()}
