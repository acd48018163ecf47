"""Reports: frozen records shown in a terminal, as JSON and as one self-contained HTML page."""

from __future__ import annotations

from narrowcast.report.environment import read_environment
from narrowcast.report.html import page
from narrowcast.report.records import (
    Bars,
    Check,
    Curve,
    Curves,
    Environment,
    Fact,
    Figure,
    Histogram,
    Latency,
    Report,
    Section,
    Series,
)

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
    "page",
    "read_environment",
]
