from __future__ import annotations

from narrowcast.observe.latency import measure


class Clock:
    """A clock that only the measured calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_median_is_in_milliseconds() -> None:
    clock = Clock()
    found = measure({"a": lambda: clock.spend(0.25)}, num_rounds=5, clock=clock)
    assert (found["a"].median_ms, found["a"].least_ms, found["a"].num_rounds) == (250.0, 250.0, 5)


def test_warmups_are_not_measured() -> None:
    clock, costs = Clock(), iter([9.0, 9.0, 1.0, 1.0, 1.0])
    found = measure({"a": lambda: clock.spend(next(costs))}, num_rounds=3, num_warmups=2, clock=clock)
    assert found["a"].median_ms == 1000.0


def test_each_round_has_every_call_once_and_turns_the_order() -> None:
    clock, calls = Clock(), []
    measure({name: lambda name=name: calls.append(name) for name in "ab"}, num_rounds=4, num_warmups=0, clock=clock)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_no_round_starts_after_the_budget_is_spent() -> None:
    clock = Clock()
    found = measure({"a": lambda: clock.spend(1.0)}, num_rounds=100, budget_s=4.5, num_warmups=0, clock=clock)
    assert found["a"].num_rounds == 5


def test_three_rounds_are_measured_whatever_they_take() -> None:
    clock = Clock()
    found = measure({"a": lambda: clock.spend(60.0)}, num_rounds=100, budget_s=0.0, clock=clock)
    assert found["a"].num_rounds == 3
