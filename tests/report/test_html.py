from __future__ import annotations

import base64
import dataclasses
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from narrowcast.errors import UnsupportedError
from narrowcast.report import Report, page
from tests.report.samples import ENVIRONMENT, REPORT


class Page(HTMLParser):
    """What a page holds, read by the standard library's parser."""

    VOID = frozenset({"meta", "img", "source", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return page(REPORT)


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


def test_page_starts_with_the_doctype(text: str) -> None:
    assert text.startswith("<!doctype html>\n<html lang=")


def test_every_tag_of_the_page_is_closed(parsed: Page) -> None:
    assert parsed.open == []


def test_page_loads_nothing_from_elsewhere(text: str, parsed: Page) -> None:
    links = [attributes.get(name) for _, attributes in parsed.tags for name in ("src", "srcset", "href")]
    assert all(link is None or link.startswith("data:image/svg+xml;base64,") for link in links)
    assert not parsed.all("script")
    assert "@import" not in text
    assert "url(" not in text


def test_pictures_load_nothing_from_elsewhere(parsed: Page) -> None:
    for picture in _pictures(parsed):
        references = re.findall(r"""(?:href|src)=["']([^"']*)""", picture) + re.findall(r"url\(([^)]*)\)", picture)
        assert all(reference.startswith("#") for reference in references)


def test_pictures_are_well_formed_and_keep_text_as_text(parsed: Page) -> None:
    light = _pictures(parsed)[0]
    texts = {element.text.strip() for element in ElementTree.fromstring(light).iter() if element.text}
    assert {"float32", "int8", "1 text", "32 texts", "280.0"} <= texts


def test_each_figure_has_a_dark_and_a_light_picture(parsed: Page) -> None:
    dark = [source["srcset"] for source in parsed.all("source") if "dark" in (source["media"] or "")]
    light = [image["src"] for image in parsed.all("img")]
    assert len(dark) == len(light) == len(REPORT.figures)
    assert not set(dark) & set(light)


def test_each_picture_has_its_description(parsed: Page) -> None:
    assert [image["alt"] for image in parsed.all("img")] == ["In words.", "Cosines in words.", "Loss in words."]


def test_numbers_of_figures_are_on_the_page_as_text(parsed: Page) -> None:
    assert "280.0" in parsed.texts
    assert "0.9986" in parsed.texts  # the mean and the median


def test_every_header_of_a_table_says_what_it_heads(parsed: Page) -> None:
    assert parsed.all("th")
    assert all(header.get("scope") in ("col", "row") for header in parsed.all("th"))


def test_text_is_escaped(text: str) -> None:
    assert "encoder/&lt;0&gt;" in text
    assert "Before &amp; after" in text


def test_failed_check_is_marked(parsed: Page) -> None:
    badges = [span["class"] for span in parsed.all("span")]
    assert badges[:2] == ["badge pass", "badge fail"]


def test_same_report_gives_the_same_page(text: str) -> None:
    assert page(REPORT) == text


def test_report_without_parts_is_a_page(parsed: Page) -> None:
    bare = Page(page(Report("Title", "Summary.", ENVIRONMENT)))
    assert bare.open == []
    assert "figures" not in [section.get("aria-labelledby") for section in bare.all("section")]


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=re.escape("Run `pip install 'narrowcast[demo]'`.")):
        page(REPORT)


def test_page_without_figures_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "Smaller." in page(dataclasses.replace(REPORT, figures=()))


def _pictures(parsed: Page) -> list[str]:
    """The SVG texts: the light ones, then the dark ones."""
    uris = [image["src"] for image in parsed.all("img")] + [source["srcset"] for source in parsed.all("source")]
    return [base64.b64decode((uri or "").split(",", 1)[1]).decode() for uri in uris]
