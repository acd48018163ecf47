"""One self-contained HTML page for a report: nothing is loaded from elsewhere, and it reads well in light and dark."""

from __future__ import annotations

import base64

from jinja2 import Environment as Templates
from jinja2 import PackageLoader, StrictUndefined

from narrowcast.plan.table import Column, Table
from narrowcast.report.plots import DARK, LIGHT, Theme, svg
from narrowcast.report.records import Bars, Curves, Figure, Report
from narrowcast.report.terminal import checks_table

__all__ = ["page"]

_BADGES = {
    "passed": "pass",
    "failed": "fail",
    "applied": "pass",
    "fell back": "warn",
    "kept": "quiet",
    "not a target": "quiet",
}
"""The class of a cell whose whole text is one of these words."""


def page(report: Report) -> str:
    """Returns the page's text.

    Pictures stand in it as data URIs, each twice: the browser shows the one for the reader's colour scheme. The numbers
    of each figure are there as a table as well.

    Args:
        report: what to show. All its text is escaped.

    Raises:
        UnsupportedError: the report has figures and matplotlib is not installed.

    Example:
        >>> from narrowcast.report import Report, read_environment
        >>> page(Report("Before & after", "Nothing was measured.", read_environment())).splitlines()[6]
        '<title>Before &amp; after</title>'
    """
    templates = Templates(
        loader=PackageLoader("narrowcast.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    figures = [(figure, _uri(figure, LIGHT), _uri(figure, DARK), _numbers(figure)) for figure in report.figures]
    return templates.get_template("page.html.jinja").render(
        report=report, figures=figures, checks=checks_table(report), badges=_BADGES
    )


def _uri(figure: Figure, theme: Theme) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg(figure, theme).encode()).decode("ascii")


def _numbers(figure: Figure) -> Table:
    if isinstance(figure, Bars):
        columns = (Column(""), *(Column(f"{series.name}, {figure.unit}", is_right=True) for series in figure.series))
        cells = [[f"{value:,.{figure.digits}f}" for value in series.values] for series in figure.series]
        return Table(columns, tuple(zip(figure.groups, *cells, strict=True)))
    if isinstance(figure, Curves):
        titles = ("first", "least", "greatest", "last")
        columns = (Column(""), *(Column(f"{title}, {figure.unit}", is_right=True) for title in titles))
        return Table(
            columns,
            tuple(
                (curve.name, *(f"{n:.{figure.digits}g}" for n in (curve.y[0], min(curve.y), max(curve.y), curve.y[-1])))
                for curve in figure.curves
            ),
        )
    values = sorted(figure.values)
    shown = {
        "least": values[0],
        "median": values[len(values) // 2],
        "mean": sum(values) / len(values),
        "greatest": values[-1],
    }
    columns = (Column(""), Column(figure.unit, is_right=True))
    return Table(columns, tuple((name, f"{value:.{figure.digits}f}") for name, value in shown.items()))
