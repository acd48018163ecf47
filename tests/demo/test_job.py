from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowcast
from narrowcast.demo.encoder import documents
from narrowcast.demo.job import Steps, demo_policy, run
from narrowcast.demo.results import results
from narrowcast.report import Latency, Report


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def said() -> list[object]:
    return []


@pytest.fixture(scope="module")
def report(out: Path, said: list[object]) -> Report:
    return run(out, Steps(say=said.append), budget_s=0.0)


def _checks(report: Report) -> dict[str, bool]:
    return {check.name: check.passed for check in report.checks}


def test_everything_that_is_no_time_holds(report: Report) -> None:
    failed = [name for name, passed in _checks(report).items() if not passed and not name.startswith("Speed")]
    assert failed == []


def test_plan_and_an_explanation_are_shown(report: Report, said: list[object]) -> None:
    text = "\n".join(map(str, said))
    assert "embeddings/word_embeddings" in text
    assert "encoder/layer/[2-5]/attention/self/value" in text


def test_page_and_data_say_the_same(report: Report, out: Path) -> None:
    assert json.loads((out / "report.json").read_text("utf-8")) == report.to_json()
    page = (out / "report.html").read_text("utf-8")
    assert all(fact.value in page for fact in report.facts)


def test_saved_folder_is_read_by_the_library(report: Report, out: Path) -> None:
    from narrowcast.demo.encoder import Encoder

    encoder = Encoder(trained=False)
    narrowcast.load(encoder.model, out / "model")
    assert encoder.embed(documents()[:2]).shape == (2, 384)


def test_agreement_with_people_before_is_the_published_one(report: Report) -> None:
    # Measured with the same model by other code: Spearman 0.508, Pearson 0.656.
    before = next(figure for figure in report.figures if "people" in figure.title).series[0]  # type: ignore[union-attr]
    assert before.values == pytest.approx((0.508, 0.656), abs=5e-4)


def test_map_of_the_demo_has_a_veto() -> None:
    policy = demo_policy()
    assert policy["encoder/layer/4/attention/self/value"] == narrowcast.keep
    assert policy["encoder/layer/0/attention/self/value"].name == "int8_from_keep"


def test_page_of_the_docs_shows_the_map_of_the_demo() -> None:
    import re

    from narrowcast.dtype_policies import files

    text = (Path(__file__).parents[2] / "docs" / "demo.md").read_text("utf-8")
    block = re.search(r"^( *)```toml\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert files.loads(block[2].replace("\n" + block[1], "\n").removeprefix(block[1])) == demo_policy()


class TestResults:
    """What decides whether the demo passes, each check made to fail once."""

    @pytest.fixture
    def embedded(self) -> Tensor:
        torch.manual_seed(0)
        return torch.nn.functional.normalize(torch.randn(50, 384), dim=-1)

    def _results(
        self,
        out: Path,
        expected: Tensor,
        embedded: Tensor,
        reloaded: Tensor,
        after_ms: float = 1.0,
        *,
        fast: bool = True,
    ) -> Report:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256))
        times = {count: {"float32": Latency(2.0, 2.0, 3), "int8": Latency(after_ms, 1.0, 3)} for count in (1, 32)}
        plan = narrowcast.plan(model, "int8")
        return results(plan, times, expected, embedded, reloaded, out, has_fast_integers=fast)

    def test_equal_embeddings_pass(self, tmp_path: Path, embedded: Tensor) -> None:
        assert self._results(tmp_path, embedded, embedded, embedded).passed

    def test_one_other_bit_after_reloading_fails(self, tmp_path: Path, embedded: Tensor) -> None:
        reloaded = embedded.clone()
        reloaded[7, 7] = torch.nextafter(reloaded[7, 7], torch.tensor(2.0))
        report = self._results(tmp_path, embedded, embedded, reloaded)
        assert not report.passed
        assert report.checks[0].measured == "1 of 19,200 values differ"

    def test_low_cosine_fails(self, tmp_path: Path, embedded: Tensor) -> None:
        other = torch.nn.functional.normalize(embedded + 0.01 * torch.randn(50, 384), dim=-1)
        assert not _checks(self._results(tmp_path, embedded, other, other))["Mean cosine to the float32 embeddings"]

    def test_slower_fails(self, tmp_path: Path, embedded: Tensor) -> None:
        report = self._results(tmp_path, embedded, embedded, embedded, after_ms=3.0)
        assert not _checks(report)["Speed at 32 texts"]

    def test_being_faster_is_not_asked_of_a_cpu_without_integer_instructions(
        self, tmp_path: Path, embedded: Tensor
    ) -> None:
        assert self._results(tmp_path, embedded, embedded, embedded, after_ms=3.0, fast=False).passed
