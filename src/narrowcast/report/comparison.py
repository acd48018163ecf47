"""How far two models are apart: the record, its table and its report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from narrowcast.plan.table import ROOT, Column, Table, format_bytes
from narrowcast.report.environment import read_environment
from narrowcast.report.records import Bars, Check, Fact, Latency, Report, Section, Series

__all__ = ["Comparison", "LayerError", "OutputError", "comparison_report", "layers_table"]


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error at one layer.

    Args:
        path: the layer.
        policy: the name of the policy it carries.
        own: relative error of its outputs for the reference's inputs; `None` where it never ran.
        accumulated: relative error of its outputs within its own model; `None` where it never ran.
        num_calls: how often it ran.
    """

    path: str
    policy: str
    own: float | None
    accumulated: float | None
    num_calls: int


@dataclass(frozen=True, slots=True)
class OutputError:
    """The error of a model's outputs, over all floating values of all batches.

    Args:
        relative: `||y - r|| / ||r||`, with `y` the outputs and `r` the reference's.
        cosine: of the two as one long vector.
        largest: the largest absolute difference.
        is_finite: whether every output is finite.
    """

    relative: float
    cosine: float
    largest: float
    is_finite: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `narrowcast.observe.compare` found.

    Args:
        layers: the layers that carry a policy, in the order of the model.
        outputs: the error of the outputs.
        bytes_before: the parameters of the reference.
        bytes_after: the parameters and stored forms of the other.
        latency_before: one forward pass of the reference on the first batch.
        latency_after: one forward pass of the other.
        num_batches: how many batches were run.
    """

    layers: tuple[LayerError, ...]
    outputs: OutputError
    bytes_before: int
    bytes_after: int
    latency_before: Latency
    latency_after: Latency
    num_batches: int

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as plain JSON values; what is not finite, which JSON cannot say, is `None`."""
        return {
            "layers": [_finite(asdict(layer)) for layer in self.layers],
            "outputs": _finite(asdict(self.outputs)),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "latency_before": asdict(self.latency_before),
            "latency_after": asdict(self.latency_after),
            "num_batches": self.num_batches,
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def layers_table(found: Comparison) -> Table:
    """Returns one row for each layer that carries a policy."""
    columns = (
        Column("path"),
        Column("policy"),
        Column("own error", is_right=True),
        Column("accumulated", is_right=True),
        Column("calls", is_right=True),
    )
    rows = tuple(
        (layer.path or ROOT, layer.policy, _error(layer.own), _error(layer.accumulated), str(layer.num_calls))
        for layer in found.layers
    )
    return Table(columns, rows, (f"{len(rows)} layers with a policy, {found.num_batches} batches",))


def _error(value: float | None) -> str:
    return "did not run" if value is None else f"{value:.5f}"


def comparison_report(found: Comparison, *, title: str, checks: tuple[Check, ...] = ()) -> Report:
    """Returns a comparison as a report, with the layers to keep first in its plot."""
    before, after = found.latency_before.median_ms, found.latency_after.median_ms
    facts = (
        Fact("outputs", f"relative error {found.outputs.relative:.5f}", f"cosine {found.outputs.cosine:.6f}"),
        Fact(
            "size",
            format_bytes(found.bytes_after),
            f"from {format_bytes(found.bytes_before)}, {found.bytes_before / max(found.bytes_after, 1):.2f} × smaller",
        ),
        Fact("latency of a batch", f"{after:.2f} ms", f"from {before:.2f} ms, {before / after:.2f} × the speed"),
    )
    ran = [layer for layer in found.layers if layer.own is not None and layer.accumulated is not None]
    worst = sorted(ran, key=lambda layer: layer.own or 0.0, reverse=True)[:12]
    figures = (
        Bars(
            "The layers with the largest own error",
            "relative error",
            tuple(layer.path or ROOT for layer in worst),
            (
                Series("accumulated", tuple(layer.accumulated or 0.0 for layer in worst)),
                Series("own", tuple(layer.own or 0.0 for layer in worst)),
            ),
            "Relative error of the twelve layers whose own error is largest.",
            digits=4,
        ),
    )
    return Report(
        title=title,
        summary=f"Outputs differ by {found.outputs.relative:.2%} of their norm.",
        environment=read_environment(),
        checks=checks,
        facts=facts,
        figures=figures if worst else (),
        sections=(Section("Error by layer", layers_table(found)),),
    )
