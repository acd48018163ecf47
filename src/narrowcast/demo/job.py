"""The demo's job: plan, apply, measure, save, reload in a new process, report."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from narrowcast import frameworks
from narrowcast.demo.encoder import Encoder, documents
from narrowcast.demo.results import results
from narrowcast.dtype_policies import DTypePolicyMap
from narrowcast.dtype_policies import files as policy_files
from narrowcast.errors import CheckpointError
from narrowcast.observe.latency import measure
from narrowcast.report import Latency, Report, page
from narrowcast.torch.cpu_kernels import has_dot_product

__all__ = ["Steps", "demo_policy", "run"]


@dataclass(frozen=True)
class Steps:
    """How the job tells what it does.

    Args:
        say: is given each finished step's result, as text or as a table.
        working: makes the context in which a step runs, from what to call it.
    """

    say: Callable[[object], None] = lambda _: None
    working: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()


def demo_policy() -> DTypePolicyMap:
    """Returns the demo's policy map, `policy.toml` beside this file.

    Example:
        >>> demo_policy()["encoder/layer/0/attention/self/query"].name
        'int8_from_keep'
    """
    with as_file(files("narrowcast.demo") / "policy.toml") as path:
        return policy_files.read(path)


def run(out: Path, steps: Steps = Steps(), *, budget_s: float = 30.0) -> Report:
    """Does the whole job and writes `report.html`, `report.json` and the saved model under `out`.

    Args:
        out: a folder; made if missing.
        steps: hears what happens.
        budget_s: the most seconds spent on measuring latency.

    Returns:
        The report; `report.passed` says whether every check holds.

    Raises:
        UnsupportedError: a package of the demo is not installed.
        CheckpointError: the process that reloads the model failed.
    """
    texts = documents()
    with steps.working("Loading the encoder"):
        encoder = Encoder()
        before = copy.copy(encoder)
        before.model = copy.deepcopy(encoder.model)
    with steps.working("Planning"):
        plan = frameworks.plan(encoder.model, demo_policy())
    steps.say(plan.table())
    steps.say(plan.explain("encoder/layer/4/attention/self/value"))

    with steps.working("Embedding 50 documents in float32"):
        expected = before.embed(texts)
    with steps.working("Quantizing"):
        frameworks.apply(encoder.model, plan)
    with steps.working("Embedding 50 documents in int8"):
        embedded = encoder.embed(texts)
    with steps.working("Measuring latency, before and after in turns"):
        times = _latencies(before, encoder, texts, budget_s)
    with steps.working("Saving, and reloading in a new process"):
        frameworks.save(encoder.model, out / "model")
        reloaded = _reload(out / "model")

    report = results(plan, times, expected, embedded, reloaded, out / "model", has_fast_integers=has_dot_product())
    with steps.working("Writing the report"):
        (out / "report.html").write_text(page(report), encoding="utf-8")
        (out / "report.json").write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False), encoding="utf-8")
    return report


def _latencies(before: Encoder, after: Encoder, texts: list[str], budget_s: float) -> dict[int, dict[str, Latency]]:
    """By number of texts: the time of one forward pass, documents cut at 64 tokens."""
    found = {}
    for num_texts in (1, 32):
        inputs = after.tokens(texts[:num_texts], max_length=64)
        with torch.inference_mode():
            found[num_texts] = measure(
                {"float32": lambda: before.model(**inputs), "int8": lambda: after.model(**inputs)},  # noqa: B023
                num_rounds=200 if num_texts == 1 else 30,
                budget_s=budget_s / 2,
                num_warmups=1,
            )
    return found


def _reload(folder: Path) -> Tensor:
    """The embeddings of the documents by the model in `folder`, computed in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "embeddings.safetensors"
        command = [sys.executable, "-m", "narrowcast.demo.reload", str(folder), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CheckpointError(
                "The process that reloads the saved model failed",
                got={"exit status": done.returncode},
                fix="Its last words were: " + (done.stderr.strip().splitlines() or ["nothing"])[-1],
            )
        # A copy, since the file goes with the scratch folder.
        embeddings: Tensor = load_file(target)["embeddings"].clone()
        return embeddings
