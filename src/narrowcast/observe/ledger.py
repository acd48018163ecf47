"""Adds up what is seen of each tensor over the calls of a step and over steps, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from narrowcast.dtype_policies import dtypes
from narrowcast.observe.records import Observation, Point
from narrowcast.observe.statistics import FIELDS, HISTOGRAM, NUM_FIELDS

__all__ = ["Ledger", "Subject"]

_AMAX, _SCALE = FIELDS.index("amax"), FIELDS.index("scale")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: one tensor of one site.

    Args:
        path: the site's path.
        kind: the site's kind.
        policy: the name of the site's policy.
        tensor: which of its tensors.
        dtype: the dtype that it is rounded to, or that it has.
        is_rounded: whether rounding can be seen; otherwise an error may still be known, from a comparison.
        is_compared: whether signal and noise come from a comparison.
    """

    path: str
    kind: str
    policy: str
    tensor: str
    dtype: str
    is_rounded: bool
    is_compared: bool = False


@dataclass
class _Account:
    sums: Any = field(default_factory=lambda: np.zeros(NUM_FIELDS + len(HISTOGRAM)))
    num_steps: int = 0
    num_nonfinite: int = 0
    history: list[Point] = field(default_factory=list)


class Ledger:
    """The accounts of all subjects.

    Args:
        num_points: how many points of each subject's history are kept. Where more come, every second is dropped, and
            from then on only every second is taken.
    """

    def __init__(self, num_points: int) -> None:
        self._num_points = num_points
        self._stride = 1
        self._num_recorded = 0
        self._accounts: dict[Subject, _Account] = {}

    @property
    def num_recorded(self) -> int:
        """How many steps were recorded."""
        return self._num_recorded

    def add(self, step: int, rows: list[tuple[Subject, Any]]) -> dict[Subject, Point]:
        """Adds a step's rows of statistics; several rows of one subject are uses of one tensor's place in that step.

        Args:
            step: the number of the step.
            rows: subjects and float64 arrays as `statistics.measure` lays them out.

        Returns:
            What the step came to for each subject.
        """
        together: dict[Subject, Any] = {}
        for subject, row in rows:
            before = together.get(subject)
            together[subject] = row if before is None else _merged(before, row)
        keeps_points = self._num_recorded % self._stride == 0
        points = {}
        for subject, row in together.items():
            account = self._accounts.setdefault(subject, _Account())
            points[subject] = point = _point(step, subject, row)
            account.num_nonfinite += not math.isfinite(row[_AMAX])
            account.sums = row if not account.num_steps else _merged(account.sums, row)
            account.num_steps += 1
            if keeps_points:
                account.history.append(point)
        self._num_recorded += 1
        if any(len(account.history) >= 2 * self._num_points for account in self._accounts.values()):
            self._stride *= 2
            for account in self._accounts.values():
                account.history = account.history[::2]
        return points

    def observations(self) -> tuple[Observation, ...]:
        """Returns what was found, in the order in which the subjects came."""
        return tuple(_observation(subject, account) for subject, account in self._accounts.items())


def _merged(a: Any, b: Any) -> Any:
    """Two rows as one: sums add up, the larger finite amax counts, the later scale."""
    total = a + b
    finite = [row[_AMAX] for row in (a, b) if math.isfinite(row[_AMAX])]
    total[_AMAX] = max(finite) if finite else math.nan
    total[_SCALE] = b[_SCALE]
    return total


def _point(step: int, subject: Subject, row: Any) -> Point:
    shares = _shares(subject, row)
    amax = float(row[_AMAX]) if math.isfinite(row[_AMAX]) else 0.0
    scale = float(row[_SCALE]) or None
    return Point(step, amax, shares["underflow"], shares["saturation"], shares["sqnr_db"], scale)


def _shares(subject: Subject, row: Any) -> dict[str, float | None]:
    value = dict(zip(FIELDS, row.tolist(), strict=False))
    count = value["elements"] or 1.0
    shares: dict[str, float | None] = dict.fromkeys(("underflow", "saturation", "subnormal", "sqnr_db"))
    if subject.is_rounded:
        shares["underflow"] = (value["nonzero"] - value["kept"]) / count
        shares["saturation"] = value["saturated"] / count
        shares["subnormal"] = value["subnormal"] / count if dtypes.get(subject.dtype).is_floating else None
    if subject.is_rounded or subject.is_compared:
        shares["sqnr_db"] = _decibels(value["signal"], value["noise"])
    return shares


def _decibels(signal: float, noise: float) -> float | None:
    """`None` where there is no signal to compare with: a tensor of zeros."""
    if not signal:
        return None
    return math.inf if not noise else 10 * math.log10(signal / noise)


def _observation(subject: Subject, account: _Account) -> Observation:
    row = account.sums
    value = dict(zip(FIELDS, row.tolist(), strict=False))
    count = value["elements"] or 1.0
    shares = _shares(subject, row)
    histogram = row[NUM_FIELDS:]
    filled = np.flatnonzero(histogram)
    return Observation(
        path=subject.path,
        kind=subject.kind,
        policy=subject.policy,
        tensor=subject.tensor,
        dtype=subject.dtype,
        num_steps=account.num_steps,
        num_elements=int(value["elements"]),
        num_nonfinite_steps=account.num_nonfinite,
        amax=value["amax"] if math.isfinite(value["amax"]) else 0.0,
        zeros=(value["elements"] - value["nonzero"]) / count,
        subnormal=shares["subnormal"],
        underflow=shares["underflow"],
        saturation=shares["saturation"],
        sqnr_db=shares["sqnr_db"],
        histogram=tuple(
            (HISTOGRAM[place], float(histogram[place]) / count)
            for place in (range(filled[0], filled[-1] + 1) if filled.size else ())
        ),
        history=tuple(account.history),
    )
