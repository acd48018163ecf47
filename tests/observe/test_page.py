from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from narrowcast.observe import Summary
from tests.observe.test_records import EXACT, INPUT, SUMMARY


@functools.cache
def whole_page() -> str:
    return SUMMARY.to_html()


def titles(page: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


def test_page_has_the_table_and_the_plots_of_each_site() -> None:
    page = whole_page()
    assert titles(page) == [
        f"{site}: {what}"
        for site in ("blocks/0/up", "(root)")
        for what in ("magnitudes", "largest magnitude", "scale", "signal to quantization noise")
    ]
    assert "25.6 dB" in page


def test_page_is_self_contained() -> None:
    assert not re.findall(r'(?:src|href)="(?!data:|#)', whole_page())


def test_sites_that_lose_most_are_drawn_and_the_others_counted() -> None:
    many = tuple(dataclasses.replace(INPUT, path=f"layer/{i}", sqnr_db=40.0 - i) for i in range(5))
    page = Summary("Net", 1, 1, 0.0, many).to_html(max_sites=2)
    assert {title.split(":")[0] for title in titles(page)} == {"layer/4", "layer/3"}
    assert "Plots are of the 2 layers that lose most; 3 more stand in the table." in page


def test_tensor_without_values_or_history_has_no_plot() -> None:
    empty = dataclasses.replace(INPUT, histogram=(), history=())
    assert titles(Summary("Net", 1, 1, 0.0, (empty,)).to_html()) == []


def test_paths_are_escaped() -> None:
    page = Summary("<Net>", 1, 1, 0.0, (dataclasses.replace(EXACT, path="<b>"),)).to_html()
    assert "<Net>" not in page
    assert "<b>" not in page


def test_page_is_written_to_a_file(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path / "observed.html")
    assert (tmp_path / "observed.html").read_text("utf-8") == whole_page()
