"""A report with every kind of part, for the tests of this folder."""

from __future__ import annotations

from narrowcast.plan.table import Column, Table
from narrowcast.report import Bars, Check, Environment, Fact, Histogram, Report, Section, Series

ENVIRONMENT = Environment("Linux x86_64", "a processor", 2, 2, "3.11.7", (("numpy", "2.4.6"),))

BARS = Bars(
    "Latency",
    "ms",
    ("1 text", "32 texts"),
    (Series("float32", (10.1, 280.0)), Series("int8", (5.1, 160.0))),
    "In words.",
)

HISTOGRAM = Histogram("Cosines", "cosine", (0.9981, 0.9990, 0.9986), "Cosines in words.")

TABLE = Table(
    (Column("path"), Column("status"), Column("bytes", is_right=True)),
    (("encoder/<0>", "applied", "24"), ("head", "kept", "8")),
    ("2 sites",),
)

REPORT = Report(
    title="Before & after",
    summary="Smaller.",
    environment=ENVIRONMENT,
    checks=(Check("Outputs are finite", True, "finite", "finite"), Check("Faster", False, "0.9 ×", "faster")),
    facts=(Fact("size", "24 B", "from 96 B"),),
    figures=(BARS, HISTOGRAM),
    sections=(Section("Plan", TABLE, "Layer by layer."),),
)
