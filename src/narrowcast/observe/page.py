"""A summary as one HTML page: its table, and distributions and histories of the sites that lose most as plots."""

from __future__ import annotations

from collections.abc import Iterator

from narrowcast.observe.records import TENSORS, Observation, Summary, decibels
from narrowcast.plan.table import ROOT
from narrowcast.report import Curve, Curves, Fact, Figure, Report, Section, page, read_environment

__all__ = ["summary_page"]


def summary_page(summary: Summary, *, max_sites: int = 12) -> str:
    """Returns the page. See `Summary.to_html`."""
    sites: dict[str, list[Observation]] = {}
    for one in summary.observations:
        sites.setdefault(one.path, []).append(one)
    # Sites whose error is not known come last, in the model's order.
    ranked = sorted(sites, key=lambda path: min((o.sqnr_db for o in sites[path] if o.sqnr_db is not None), default=1e9))
    drawn = ranked[:max_sites]
    figures = [figure for path in drawn for figure in _figures(path or ROOT, sites[path])]
    left_out = len(sites) - len(drawn)
    report = Report(
        title=f"What {summary.model} loses to narrow dtypes",
        summary=f"{summary.num_recorded} of {summary.num_steps} steps were recorded at {len(sites)} layers."
        + (
            f" Plots are of the {len(drawn)} layers that lose most; {left_out} more stand in the table."
            * (left_out > 0)
        ),
        environment=read_environment(),
        facts=tuple(_facts(summary)),
        figures=tuple(figures),
        sections=(
            Section("Layer by layer", summary.table(), "Shares of elements; amax over all steps; the last scale."),
        ),
    )
    return page(report)


def _facts(summary: Summary) -> Iterator[Fact]:
    worst = next(iter(summary.worst(1)), None)
    if worst is not None:
        yield Fact("lowest SQNR", decibels(worst.sqnr_db), worst.place)
    for name in ("underflow", "saturation"):
        known = [(value, one) for one in summary.observations if (value := getattr(one, name)) is not None]
        if known:
            value, one = max(known, key=lambda pair: pair[0])
            yield Fact(f"most {name}", f"{value:.2%}", one.place if value else "everywhere")
    broken = sum(one.num_nonfinite_steps > 0 for one in summary.observations)
    yield Fact("tensors with NaN or infinity", str(broken), f"of {len(summary.observations)}")
    yield Fact("time", f"{summary.overhead:.1%}", "what recording took, of the steps' own time")


def _figures(path: str, observations: list[Observation]) -> Iterator[Figure]:
    filled = [one for one in observations if one.histogram]
    if filled:
        yield Curves(
            f"{path}: magnitudes",
            "share of elements",
            "power of two",
            tuple(
                Curve(
                    one.tensor,
                    tuple(float(exponent) for exponent, _ in one.histogram),
                    tuple(share for _, share in one.histogram),
                    TENSORS.index(one.tensor),
                )
                for one in filled
            ),
            f"How the magnitudes of {', '.join(one.tensor for one in filled)} of {path} spread over powers of two.",
            digits=2,
            is_stepped=True,
        )
    moving = [one for one in observations if len(one.history) > 1]
    if moving:
        yield _over_steps(f"{path}: largest magnitude", "amax", moving, "amax")
    scaled = [one for one in moving if any(point.scale is not None for point in one.history)]
    if scaled:
        yield _over_steps(f"{path}: scale", "scale", scaled, "scale")
    noisy = [one for one in moving if any(point.sqnr_db is not None for point in one.history)]
    if noisy:
        yield _over_steps(f"{path}: signal to quantization noise", "dB", noisy, "sqnr_db")


def _over_steps(title: str, unit: str, observations: list[Observation], field: str) -> Curves:
    curves = []
    for one in observations:
        points = [(float(point.step), getattr(point, field)) for point in one.history]
        known = [(x, y) for x, y in points if y is not None and abs(y) != float("inf")]
        if known:
            x, y = zip(*known, strict=True)
            curves.append(Curve(one.tensor, x, y, TENSORS.index(one.tensor)))
    return Curves(
        title,
        unit,
        "steps",
        tuple(curves),
        f"{title} over {len(observations[0].history)} recorded steps.",
        digits=3,
        is_logarithmic=field != "sqnr_db",
    )
