"""What `observe` found: frozen records, shown as a table, as JSON and as a page.

Shares are of all elements that were looked at. `None` means that a number does not exist for this tensor, for example
an error where nothing was rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import PathError, closest
from narrowcast.plan.table import ROOT, Column, Table

__all__ = ["TENSORS", "Observation", "Point", "Summary"]

TENSORS = ("input", "weight", "output", "gradient")
"""The tensors of a site: what flows in, its weight, what flows out, and the gradient with respect to what flows out."""


@dataclass(frozen=True, slots=True)
class Point:
    """One tensor of one site in one step.

    Args:
        step: the number of the step, counted from 0 at the beginning of `observe`.
        amax: its largest finite magnitude.
        underflow: the share that the narrow dtype turns to zero.
        saturation: the share that lies beyond the narrow dtype's largest value.
        sqnr_db: signal-to-quantization-noise ratio in decibels.
        scale: what the values were multiplied by before they were rounded, where the whole tensor has one scale.
    """

    step: int
    amax: float
    underflow: float | None = None
    saturation: float | None = None
    sqnr_db: float | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """One tensor of one site over all steps that were recorded.

    Args:
        path: the site's path.
        kind: the site's kind.
        policy: the name of the policy that the site carries.
        tensor: one of `TENSORS`.
        dtype: the dtype that the policy rounds the tensor to; where it rounds nothing, the dtype the tensor has.
        num_steps: in how many recorded steps the tensor was seen.
        num_elements: how many of its elements the shares come from. `amax` comes from all.
        num_nonfinite_steps: in how many of the steps it held NaN or infinity.
        amax: the largest finite magnitude.
        zeros: the share that was zero before rounding.
        subnormal: the share, zeros not counted, that lies below the dtype's smallest normal value, where digits are
            lost one by one; after scaling. `None` for integers.
        underflow: the share that was not zero and is rounded to zero.
        saturation: the share that lies beyond the dtype's largest value, after scaling.
        sqnr_db: signal-to-quantization-noise ratio in decibels, of the sums over all steps; infinity where nothing is
            lost. For the output of a linear layer it compares the layer as it runs with the same layer in float32.
        histogram: pairs `(exponent, share)`: magnitudes in `[2**exponent, 2**(exponent + 1))`, before scaling. The
            first and the last pair also hold what lies beyond. Zeros are left out.
        history: recorded steps in order; thinned evenly where there are more than `observe` keeps.
    """

    path: str
    kind: str
    policy: str
    tensor: str
    dtype: str
    num_steps: int
    num_elements: int
    num_nonfinite_steps: int
    amax: float
    zeros: float
    subnormal: float | None
    underflow: float | None
    saturation: float | None
    sqnr_db: float | None
    histogram: tuple[tuple[int, float], ...]
    history: tuple[Point, ...]

    @property
    def place(self) -> str:
        """The site and the tensor in words."""
        return f"{self.path or ROOT}, {self.tensor}"


@dataclass(frozen=True, slots=True)
class Summary:
    """What `observe` found at every site.

    Args:
        model: the model's class.
        num_steps: how many steps (or passes in eval mode) were made.
        num_recorded: how many of them were recorded.
        overhead: the time that recording took, as a share of the steps' time without it.
        observations: one for each tensor of each site, in the model's order.

    Example:
        >>> import torch, narrowcast
        >>> from narrowcast.observe import observe
        >>> model = narrowcast.apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), "mixed_bfloat16").eval()
        >>> with observe(model) as watch:
        ...     _ = model(torch.ones(2, 64))
        >>> [(o.path, o.tensor, o.dtype, o.amax) for o in watch.summary().observations][0]
        ('0', 'input', 'bfloat16', 1.0)
    """

    model: str
    num_steps: int
    num_recorded: int
    overhead: float
    observations: tuple[Observation, ...]

    def table(self) -> Table:
        """Returns the observations as a table, one row a tensor."""
        rows = []
        before: str | None = None
        for one in self.observations:
            rows.append(
                (
                    (one.path or ROOT) if one.path != before else "",
                    one.tensor,
                    one.dtype,
                    f"{one.amax:.3g}",
                    _share(one.zeros),
                    _share(one.underflow),
                    _share(one.saturation),
                    decibels(one.sqnr_db),
                    f"{scale:.3g}" if (scale := _last_scale(one)) is not None else "–",
                )
            )
            before = one.path
        titles = ("amax", "zeros", "underflow", "saturated", "SQNR", "scale")
        return Table(
            (Column("site"), Column("tensor"), Column("dtype"), *(Column(title, is_right=True) for title in titles)),
            tuple(rows),
            footer=tuple(self._footer()),
            title=f"{self.model}: {self.num_recorded} of {self.num_steps} steps recorded",
        )

    def _footer(self) -> list[str]:
        broken = [one for one in self.observations if one.num_nonfinite_steps]
        lines = [
            f"{one.place}: NaN or infinity in {one.num_nonfinite_steps} of {one.num_steps} steps" for one in broken[:10]
        ]
        if len(broken) > len(lines):
            lines.append(f"NaN or infinity in {len(broken) - len(lines)} more tensors")
        return [*lines, f"recording took {self.overhead:.1%} of the steps' time"]

    def __str__(self) -> str:
        return self.table().to_text()

    def __getitem__(self, key: tuple[str, str]) -> Observation:
        """Returns the observation of a site's tensor, `summary["head", "gradient"]`.

        Raises:
            PathError: there is none; the nearest is suggested.
        """
        for one in self.observations:
            if (one.path, one.tensor) == key:
                return one
        names = {f"{one.path}, {one.tensor}": one for one in self.observations}
        near = closest(", ".join(map(str, key)) if isinstance(key, tuple) else f"{key}, input", names)
        raise PathError(
            "Nothing was observed there",
            got={"key": key},
            expected=f"the path of a site and one of {', '.join(TENSORS)}",
            suggestion=near[0] if near else None,
        )

    def worst(self, count: int = 10) -> tuple[Observation, ...]:
        """Returns the observations with the lowest signal-to-quantization-noise ratio, the lowest first.

        Args:
            count: the most that are returned.
        """
        with_error = [one for one in self.observations if one.sqnr_db is not None]
        return tuple(sorted(with_error, key=lambda one: one.sqnr_db or 0.0)[:count])

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values. Infinity and NaN, which JSON does not have, are written as `None`."""
        return {
            "model": self.model,
            "num_steps": self.num_steps,
            "num_recorded": self.num_recorded,
            "overhead": self.overhead,
            "observations": [_plain(one) for one in self.observations],
        }

    def to_html(self, *, max_sites: int = 12) -> str:
        """Returns one self-contained page: the table, and for each site its distribution and its history as plots.

        Args:
            max_sites: plots are drawn for as many sites as this; those with the lowest signal-to-noise ratio come
                first.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        from narrowcast.observe.page import summary_page

        return summary_page(self, max_sites=max_sites)

    def write(self, path: str | Path, *, max_sites: int = 12) -> None:
        """Writes the page of `to_html` to a file.

        Args:
            path: the file.
            max_sites: as in `to_html`.
        """
        Path(path).write_text(self.to_html(max_sites=max_sites), encoding="utf-8")


def _last_scale(one: Observation) -> float | None:
    return one.history[-1].scale if one.history else None


def _share(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.1%}" if value >= 0.001 else f"{value:.0e}"


def decibels(value: float | None) -> str:
    """Writes a signal-to-noise ratio as the table shows it."""
    if value is None:
        return "–"
    return "exact" if math.isinf(value) and value > 0 else f"{value:.1f} dB"


def _plain(record: Observation | Point) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name in record.__slots__:
        value = getattr(record, name)
        if name == "history":
            value = [_plain(point) for point in value]
        elif name == "histogram":
            value = [list(pair) for pair in value]
        elif isinstance(value, float) and not math.isfinite(value):
            value = None
        plain[name] = value
    return plain
