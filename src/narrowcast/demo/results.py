"""What the demo measured, as a report: facts, figures, and the checks that decide whether it passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.demo.encoder import ratings
from narrowcast.plan.plan import Plan
from narrowcast.plan.table import format_bytes
from narrowcast.report import (
    Bars,
    Check,
    Fact,
    Histogram,
    Latency,
    Report,
    Section,
    Series,
    read_environment,
)

__all__ = ["MAX_LOSS", "MIN_COSINE", "results"]

MIN_COSINE = 0.997
"""What per-token scales for activations keep on this encoder; with one scale a tensor it falls to 0.94."""

MAX_LOSS = 0.02
"""How far a correlation with the human ratings may fall. The ratings' own noise moves it by more than that."""


@dataclass(frozen=True)
class _Quality:
    spearman: float
    pearson: float


def _quality(embedded: Tensor) -> _Quality:
    """Correlation of the documents' cosines with how similar people found them, over all 1,225 pairs."""
    from scipy.stats import pearsonr, spearmanr

    rows, columns = torch.triu_indices(len(embedded), len(embedded), offset=1)
    cosines = (embedded @ embedded.T)[rows, columns].numpy()
    human = ratings()[rows.numpy(), columns.numpy()]
    return _Quality(float(spearmanr(cosines, human).statistic), float(pearsonr(cosines, human).statistic))


def results(
    plan: Plan,
    times: dict[int, dict[str, Latency]],
    expected: Tensor,
    embedded: Tensor,
    reloaded: Tensor,
    folder: Path,
    *,
    has_fast_integers: bool,
) -> Report:
    """Puts what was measured into a report, with what has to hold.

    Args:
        plan: the plan that was carried out.
        times: by number of texts, the latency of a forward pass, `float32` and `int8`.
        expected: embeddings before, shape `(documents, width)`, of unit length.
        embedded: embeddings after.
        reloaded: embeddings of the model that was saved and loaded in another process.
        folder: where it was saved.
        has_fast_integers: whether the CPU has an 8-bit dot product. Without one, int8 saves bytes and no time, as the
            plan says beforehand, and being faster is not asked.
    """
    cosines = (expected * embedded).sum(-1)
    human_before, human_after = _quality(expected), _quality(embedded)
    num_differing = int((embedded != reloaded).sum())
    bytes_before, bytes_after = plan.totals.bytes_before, plan.totals.bytes_after
    bytes_file = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    medians = {count: (t["float32"].median_ms, t["int8"].median_ms) for count, t in times.items()}
    ratios = {count: slow / fast for count, (slow, fast) in medians.items()}
    mean, least = float(cosines.mean()), float(cosines.min())
    num_applied = sum(row.status.value == "applied" for row in plan)

    checks = (
        Check(
            "The model reloaded in a new process gives bit-equal embeddings",
            num_differing == 0,
            f"{num_differing} of {embedded.numel():,} values differ",
            "0",
        ),
        Check("Mean cosine to the float32 embeddings", mean >= MIN_COSINE, f"{mean:.4f}", f"at least {MIN_COSINE}"),
        Check(
            "Agreement with people (Spearman) is kept",
            human_after.spearman >= human_before.spearman - MAX_LOSS,
            f"{human_before.spearman:.3f} → {human_after.spearman:.3f}",
            f"at most {MAX_LOSS} lower",
        ),
        Check(
            "Bytes of the model",
            bytes_after * 3 <= bytes_before,
            f"{bytes_before / bytes_after:.2f} × smaller",
            "at least 3 ×",
        ),
        *(
            Check(f"Speed at {_texts(count)}", ratio > 1, f"{ratio:.2f} × of float32", "faster")
            for count, ratio in ratios.items()
            if has_fast_integers
        ),
    )
    facts = (
        Fact("size", format_bytes(bytes_after), f"from {format_bytes(bytes_before)}; file {format_bytes(bytes_file)}"),
        *(
            Fact(
                f"latency, {_texts(count)}",
                f"{fast:.1f} ms",
                f"from {slow:.1f} ms: {ratios[count]:.2f} × the speed",
            )
            for count, (slow, fast) in medians.items()
        ),
        Fact("mean cosine to float32", f"{mean:.4f}", f"least of 50 documents {least:.4f}"),
        Fact("agreement with people", f"{human_after.spearman:.3f}", f"Spearman; float32 {human_before.spearman:.3f}"),
    )
    return Report(
        title="A sentence encoder in int8",
        summary=(
            f"{num_applied} layers of MiniLM-L6 take int8 by three rules. The model is "
            f"{bytes_before / bytes_after:.1f} × smaller and runs at {ratios[32]:.2f} × its speed, its embeddings stay "
            f"at a mean cosine of {mean:.4f}, and a new "
            f"process that loads it gives {'the same bits' if num_differing == 0 else 'other values'}."
        ),
        environment=read_environment(num_threads=torch.get_num_threads()),
        checks=checks,
        facts=facts,
        figures=(
            _size_figure(plan),
            Bars(
                "Latency a text",
                "ms",
                tuple(f"{_texts(count)} at once" for count in medians),
                tuple(
                    Series(name, tuple(pair[index] / count for count, pair in medians.items()))
                    for index, name in enumerate(("float32", "int8"))
                ),
                "Milliseconds a text, for one text and for 32 texts of up to 64 tokens at once, float32 and int8.",
                digits=2,
            ),
            Bars(
                "Agreement with people's ratings of 1,225 pairs",
                "correlation",
                ("Spearman", "Pearson"),
                (
                    Series("float32", (human_before.spearman, human_before.pearson)),
                    Series("int8", (human_after.spearman, human_after.pearson)),
                ),
                "Correlation of embedding cosines with human similarity ratings, float32 and int8.",
                digits=3,
            ),
            Histogram(
                "Cosine of each document's embedding to float32",
                "cosine",
                tuple(cosines.tolist()),
                f"Cosines of 50 embeddings, int8 to float32, from {least:.4f} to {float(cosines.max()):.4f}.",
            ),
        ),
        sections=(
            Section(
                "Plan",
                plan.table(),
                "What each rule does at each layer, known before a tensor was touched.",
            ),
        ),
    )


def _size_figure(plan: Plan) -> Bars:
    kinds = {"embedding": "embeddings", "linear": "linear layers"}
    sizes: dict[str, list[float]] = {name: [0.0, 0.0] for name in (*kinds.values(), "the rest")}
    for row in plan:
        name = kinds.get(row.site.kind, "the rest")
        sizes[name][0] += row.bytes_before / 1e6
        sizes[name][1] += row.bytes_after / 1e6
    return Bars(
        "Size by kind of layer",
        "MB",
        tuple(sizes),
        tuple(
            Series(name, tuple(pair[index] for pair in sizes.values()))
            for index, name in enumerate(("float32", "int8"))
        ),
        "Megabytes of parameters by kind of layer, float32 and int8.",
        digits=2,
    )


def _texts(count: int) -> str:
    return f"{count} text" if count == 1 else f"{count} texts"
