"""What a report is made of: frozen records that a terminal, a JSON file and an HTML page show alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from narrowcast.errors import PolicyTypeError
from narrowcast.plan.table import Table

__all__ = [
    "Bars",
    "Check",
    "Curve",
    "Curves",
    "Environment",
    "Fact",
    "Figure",
    "Histogram",
    "Latency",
    "Report",
    "Section",
    "Series",
]


@dataclass(frozen=True, slots=True)
class Fact:
    """One measured number in words.

    Args:
        name: what was measured (`latency, 1 text`).
        value: the number with its unit (`5.4 ms`).
        note: what to compare it with, or how it came about; may be empty.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that had to hold.

    Args:
        name: what was checked, as a sentence without its full stop.
        passed: whether it holds.
        measured: the value found.
        wanted: the rule it had to meet.
    """

    name: str
    passed: bool
    measured: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Latency:
    """The time that one call takes.

    Args:
        median_ms: the median over all rounds, in milliseconds.
        least_ms: the shortest.
        num_rounds: how many rounds were measured.
    """

    median_ms: float
    least_ms: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Series:
    """One row of numbers, one for each group of a figure.

    Args:
        name: what the legend calls it.
        values: the numbers, in the figure's unit.
    """

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars in groups: each group has one bar of every series.

    Args:
        title: the claim or the question.
        unit: the unit of all values, as it stands on the axis.
        groups: the names of the groups.
        series: the series; the first is what the others are compared with.
        description: what the figure shows, in a sentence, for those who cannot see it.
        digits: how many decimal places the values are written with.
    """

    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]
    description: str
    digits: int = 1

    def __post_init__(self) -> None:
        for series in self.series:
            if len(series.values) != len(self.groups):
                raise PolicyTypeError(
                    f"Series {series.name!r} does not fit the figure {self.title!r}",
                    got={"values": len(series.values)},
                    expected=f"one value for each of the {len(self.groups)} groups",
                )


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each range of values occurs.

    Args:
        title: the claim or the question.
        unit: what the values are, as it stands on the axis.
        values: the values.
        description: what the figure shows, in a sentence, for those who cannot see it.
        digits: how many decimal places the values are written with.
    """

    title: str
    unit: str
    values: tuple[float, ...]
    description: str
    digits: int = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure.

    Args:
        name: what the legend calls it.
        x: where each point lies, rising.
        y: the numbers, one for each of `x`.
        color: which of the theme's colours it has, so that it has the same in several figures. `None`: the next one.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over a common axis: a loss over steps, a distribution over exponents.

    Args:
        title: the claim or the question.
        unit: the unit of all numbers, as it stands on the axis.
        x_unit: what the points are counted in.
        curves: the lines.
        description: what the figure shows, in a sentence, for those who cannot see it.
        digits: how many significant digits the numbers are written with.
        is_logarithmic: whether the axis of the numbers grows by factors; what is not above 0 is then left out.
        is_stepped: whether each number holds for a whole bin, so that lines rise in steps.
        marks: pairs of a place on the horizontal axis and the name of the upright line that is drawn there.
    """

    title: str
    unit: str
    x_unit: str
    curves: tuple[Curve, ...]
    description: str
    digits: int = 4
    is_logarithmic: bool = False
    is_stepped: bool = False
    marks: tuple[tuple[float, str], ...] = ()

    def __post_init__(self) -> None:
        for curve in self.curves:
            if len(curve.x) != len(curve.y) or not curve.x:
                raise PolicyTypeError(
                    f"Curve {curve.name!r} does not fit the figure {self.title!r}",
                    got={"x": len(curve.x), "y": len(curve.y)},
                    expected="as many numbers as places, and one at least",
                )


Figure = Bars | Histogram | Curves


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its heading.

    Args:
        heading: the heading.
        table: the table.
        text: a sentence or two above the table; may be empty.
    """

    heading: str
    table: Table
    text: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the numbers were measured.

    Args:
        system: operating system and architecture.
        processor: the processor's name.
        num_cores: cores that this process may use.
        num_threads: threads that the framework used, or `None` where nothing was computed.
        python: Python's version.
        packages: installed versions of the packages that matter, `(name, version)`.
    """

    system: str
    processor: str
    num_cores: int
    num_threads: int | None
    python: str
    packages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report.

    Args:
        title: its title.
        summary: the result in a sentence or two.
        environment: where it was measured.
        checks: what had to hold.
        facts: the numbers.
        figures: the plots.
        sections: the tables.
    """

    title: str
    summary: str
    environment: Environment
    checks: tuple[Check, ...] = ()
    facts: tuple[Fact, ...] = ()
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values.

        Example:
            >>> environment = Environment("Linux x86_64", "a processor", 2, None, "3.11.7", (("numpy", "2.4.6"),))
            >>> Report("A report", "Nothing was measured.", environment).to_json()["environment"]["packages"]
            {'numpy': '2.4.6'}
        """
        return {
            "title": self.title,
            "summary": self.summary,
            "passed": self.passed,
            "environment": {**asdict(self.environment), "packages": dict(self.environment.packages)},
            "checks": [asdict(check) for check in self.checks],
            "facts": [asdict(fact) for fact in self.facts],
            "figures": [_listed(asdict(figure)) for figure in self.figures],
            "sections": [
                {"heading": section.heading, "text": section.text, "table": _listed(asdict(section.table))}
                for section in self.sections
            ],
        }


def _listed(value: Any) -> Any:
    """Turns tuples into lists, as they come back from a JSON file."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
