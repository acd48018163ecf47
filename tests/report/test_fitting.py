from __future__ import annotations

import pytest

from narrowcast.plan.table import Column, Table
from narrowcast.report.fitting import fit, natural_width

LONG = "a reason that is much longer than anything beside it"
KERNEL = "a kernel with a name of many words"
TABLE = Table(
    (
        Column("path"),
        Column("rule"),
        Column("bytes", is_right=True),
        Column("kernel", can_wrap=True),
        Column("reason", can_wrap=True),
    ),
    (
        ("encoder/layer/0/attention/query", "encoder/layer/[0-9]+/.*", "24", KERNEL, LONG),
        ("encoder/layer/1/attention/query", "encoder/layer/[0-9]+/.*", "24", KERNEL, LONG),
        ("head", "", "8", "", ""),
    ),
    ("3 layers",),
    "Plan",
)


def test_table_that_fits_is_left_alone() -> None:
    assert fit(TABLE, natural_width(TABLE)) is TABLE


def test_natural_width_is_that_of_the_longest_row() -> None:
    assert natural_width(TABLE) == max(len(line) for line in TABLE.to_text().splitlines())


def test_wrappable_columns_go_first_and_together() -> None:
    fitted = fit(TABLE, natural_width(TABLE) - 1)
    assert [column.title for column in fitted.columns] == ["path", "rule", "bytes", "note"]
    assert fitted.footer == (f"[1] kernel: {KERNEL}; reason: {LONG}", "3 layers")


def test_then_the_widest_other_column_goes() -> None:
    fitted = fit(TABLE, 50)
    assert [column.title for column in fitted.columns] == ["path", "bytes", "note"]
    assert fitted.footer[0] == f"[1] rule: encoder/layer/[0-9]+/.*; kernel: {KERNEL}; reason: {LONG}"


def test_rows_with_the_same_words_share_a_note_and_others_have_none() -> None:
    assert [row[-1] for row in fit(TABLE, 50).rows] == ["[1]", "[1]", ""]


@pytest.mark.parametrize("width", [0, 1, 10, 60, 1000])
def test_path_and_numbers_stay_at_any_width(width: int) -> None:
    fitted = fit(TABLE, width)
    titles = [column.title for column in fitted.columns]
    assert {"path", "bytes"} <= set(titles)
    assert [row[titles.index("bytes")] for row in fitted.rows] == ["24", "24", "8"]


@pytest.mark.parametrize("width", [0, 50, 100, 1000])
def test_no_word_is_lost_at_any_width(width: int) -> None:
    text = fit(TABLE, width).to_text()
    assert all(cell in text for row in TABLE.rows for cell in row)


def test_table_without_rows_fits() -> None:
    empty = Table((Column("a column with a very long title"),), ())
    assert fit(empty, 3) == empty
