"""Figures as SVG pictures, in a light and a dark form."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from narrowcast.errors import UnsupportedError
from narrowcast.report.records import Bars, Curves, Figure, Histogram

__all__ = ["DARK", "LIGHT", "Theme", "svg"]


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of a picture.

    Args:
        ink: text and axes.
        grid: the grid's lines.
        series: one colour a series. They differ in lightness as well as in hue, so that they stay apart in grey and
            for readers who see fewer colours.
    """

    ink: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(ink="#1f2430", grid="#d9dde5", series=("#9aa3b2", "#1d4ed8", "#b45309", "#047857", "#9d174d", "#6d28d9"))
DARK = Theme(ink="#e6e9ef", grid="#3a4150", series=("#7c8798", "#7db0ff", "#f5b35c", "#5fd3a6", "#f48fb1", "#c4a7ff"))


def svg(figure: Figure, theme: Theme) -> str:
    """Draws `figure` and returns the SVG file's text.

    The background is transparent and text stays text, so that the picture scales and can be searched.

    Args:
        figure: what to draw.
        theme: its colours.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UnsupportedError(
            "Plots need matplotlib, which is not installed",
            expected="the packages of the extra 'demo'",
            fix="Run `pip install 'narrowcast[demo]'`",
        ) from None

    settings = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "svg.fonttype": "none",
        "svg.hashsalt": figure.title,  # the same figure gives the same file
        "text.color": theme.ink,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        # Never pyplot: it keeps global state and may start a window system.
        canvas = Canvas(figsize=(5.6, 3.1), layout="constrained")
        canvas.patch.set_alpha(0.0)
        axes = canvas.add_subplot()
        axes.patch.set_alpha(0.0)
        if isinstance(figure, Bars):
            _draw_bars(axes, figure, theme)
        elif isinstance(figure, Curves):
            _draw_curves(axes, figure, theme)
        else:
            _draw_histogram(axes, figure, theme)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue().replace("'DejaVu Sans', ", "")
    return text[text.index("<svg") :]


def _draw_bars(axes: Any, figure: Bars, theme: Theme) -> None:
    """Horizontal bars where there are many groups or long names, else vertical ones."""
    horizontal = len(figure.groups) > 5
    thickness = 0.8 / len(figure.series)
    for index, series in enumerate(figure.series):
        offset = (index - (len(figure.series) - 1) / 2) * thickness
        at = [position + offset for position in range(len(figure.groups))]
        # The first colour is the quiet one, for what the others are compared with.
        color = theme.series[(index + (len(figure.series) == 1)) % len(theme.series)]
        draw = axes.barh if horizontal else axes.bar
        bars = draw(at, series.values, thickness * 0.92, color=color, label=series.name)
        if len(figure.groups) <= 12:
            labels = [f"{value:,.{figure.digits}f}" for value in series.values]
            axes.bar_label(bars, labels=labels, padding=2, fontsize=8.5, color=theme.ink)
    ticks = range(len(figure.groups))
    if horizontal:
        axes.set_yticks(ticks, figure.groups)
        axes.invert_yaxis()
        axes.set_xlabel(figure.unit)
        axes.grid(axis="x", color=theme.grid, linewidth=0.8)
        # A row for each group, however many there are.
        axes.figure.set_size_inches(5.6, max(3.1, 0.8 + 0.21 * len(figure.groups) * len(figure.series)))
        axes.margins(x=0.14)
    else:
        axes.set_xticks(ticks, figure.groups)
        axes.set_ylabel(figure.unit)
        axes.grid(axis="y", color=theme.grid, linewidth=0.8)
        axes.margins(y=0.14)
        if len(figure.groups) == 1:
            axes.set_xlim(-0.9, 0.9)
    if len(figure.series) > 1:
        axes.figure.legend(loc="outside upper right", ncols=len(figure.series), labelcolor=theme.ink)


def _draw_curves(axes: Any, figure: Curves, theme: Theme) -> None:
    styles = ("-", "--", "-.", ":")
    for index, curve in enumerate(figure.curves):
        # A single line takes the first loud colour; dashes tell apart what runs on top of each other.
        chosen = index + (len(figure.curves) == 1) if curve.color is None else curve.color
        color = theme.series[chosen % len(theme.series)]
        points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y > 0 or not figure.is_logarithmic]
        x, y = zip(*points, strict=True) if points else ((), ())
        drawstyle = "steps-mid" if figure.is_stepped else "default"
        style = "-" if figure.is_stepped else styles[index % len(styles)]
        axes.plot(x, y, style, color=color, label=curve.name, linewidth=1.5, drawstyle=drawstyle)
        if figure.is_stepped:
            axes.fill_between(x, y, step="mid", color=color, alpha=0.12, linewidth=0)
    for place, name in figure.marks:
        axes.axvline(place, color=theme.ink, linewidth=0.9, linestyle=":")
        axes.annotate(
            name,
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-2, -2),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=8,
            color=theme.ink,
        )
    if figure.is_logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(figure.x_unit)
    axes.set_ylabel(figure.unit)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    if len(figure.curves) > 1:
        axes.figure.legend(loc="outside upper right", ncols=min(3, len(figure.curves)), labelcolor=theme.ink)


def _draw_histogram(axes: Any, figure: Histogram, theme: Theme) -> None:
    axes.hist(figure.values, bins=min(20, max(5, len(figure.values) // 3)), color=theme.series[1], rwidth=0.94)
    mean = sum(figure.values) / len(figure.values)
    axes.axvline(mean, color=theme.ink, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"mean {mean:.{figure.digits}f}",
        (mean, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color=theme.ink,
    )
    axes.set_xlabel(figure.unit)
    axes.set_ylabel("how many")
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
