"""Tables as values."""

from __future__ import annotations

import html.parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.plan import Column, Table, format_bytes

COLUMNS = (Column("path"), Column("bytes", is_right=True), Column("reason", can_wrap=True))


def test_text_is_aligned_without_blanks_at_the_ends() -> None:
    table = Table(COLUMNS, (("a/b", "1", ""), ("c", "22", "too small")), ("2 rows",), "Title")
    assert table.to_text() == (
        "Title\npath  bytes  reason\n────  ─────  ─────────\na/b       1\nc        22  too small\n2 rows"
    )
    assert str(table) == table.to_text()


def test_columns_that_can_wrap_are_narrowed_to_a_width() -> None:
    table = Table(COLUMNS, (("a", "1", "eleven outputs are not a multiple of sixteen"),))
    lines = table.to_text(30).splitlines()
    assert max(map(len, lines)) <= 30
    assert " ".join(line[13:].strip() for line in lines[2:]) == "eleven outputs are not a multiple of sixteen"


def test_columns_that_cannot_wrap_stay_whole() -> None:
    table = Table(COLUMNS, (("a" * 50, "1", "x"),))
    assert "a" * 50 in table.to_text(20)


def test_an_empty_table_has_its_head() -> None:
    assert Table(COLUMNS, ()).to_text().splitlines()[0] == "path  bytes  reason"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="A row has 1 cells where the table has 3 columns"):
        Table(COLUMNS, (("a",),))


@given(st.text(max_size=20))
def test_html_shows_any_text_as_it_is(text: str) -> None:
    found: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_data(self, data: str) -> None:
            found.append(data)

        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag in {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}

    reader = Reader()
    reader.feed(Table((Column("c"),), ((text,),)).to_html())
    reader.close()
    # A parser of HTML reads a carriage return, with or without a line feed, as a line feed; nothing else changes.
    assert text.strip() in "".join(found)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (90_870_000, "90.9 MB"),
        (10**9, "1.0 GB"),
        (10**12, "1.0 TB"),
        (10**15, "1.0 PB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_bytes_are_shown_in_decimal_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
