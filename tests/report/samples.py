"""A report with every kind of part, for the tests of this folder."""

from __future__ import annotations

from narrowcast.plan.table import Column, Table
from narrowcast.report import Bars, Check, Curve, Curves, Environment, Fact, Histogram, Report, Section, Series

ENVIRONMENT = Environment("Linux x86_64", "a processor", 2, 2, "3.11.7", (("numpy", "2.4.6"),))

BARS = Bars(
    "Latency",
    "ms",
    ("1 text", "32 texts"),
    (Series("float32", (10.1, 280.0)), Series("int8", (5.1, 160.0))),
    "In words.",
)

HISTOGRAM = Histogram("Cosines", "cosine", (0.9981, 0.9990, 0.9986), "Cosines in words.")

CURVES = Curves(
    "Loss",
    "nats",
    "steps",
    (Curve("float32", (0.0, 10.0, 20.0), (4.4, 2.5, 2.0)), Curve("float8", (0.0, 20.0), (4.4, 2.01))),
    "Loss in words.",
    marks=((10.0, "warm-up ends"),),
)

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
    figures=(BARS, HISTOGRAM, CURVES),
    sections=(Section("Plan", TABLE, "Layer by layer."),),
)
