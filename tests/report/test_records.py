from __future__ import annotations

import dataclasses
import json

import pytest

from narrowcast.errors import PolicyTypeError
from narrowcast.report import Bars, Check, Curve, Curves, Report, Series
from tests.report.samples import ENVIRONMENT, REPORT


def test_report_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.title = "x"  # type: ignore[misc]


def test_report_passes_only_if_every_check_does() -> None:
    good, bad = Check("a", True, "1", "1"), Check("b", False, "0", "1")
    assert Report("t", "s", ENVIRONMENT, checks=(good,)).passed
    assert not Report("t", "s", ENVIRONMENT, checks=(good, bad)).passed


def test_report_without_checks_passes() -> None:
    assert Report("t", "s", ENVIRONMENT).passed


def test_json_of_a_report_survives_a_file() -> None:
    data = REPORT.to_json()
    assert json.loads(json.dumps(data)) == data


def test_json_of_a_report_has_every_part() -> None:
    data = REPORT.to_json()
    assert data["passed"] is False
    assert data["environment"]["packages"] == {"numpy": "2.4.6"}
    assert [check["name"] for check in data["checks"]] == ["Outputs are finite", "Faster"]
    assert data["figures"][0]["series"][1] == {"name": "int8", "values": [5.1, 160.0]}
    assert data["sections"][0]["table"]["rows"][0] == ["encoder/<0>", "applied", "24"]


def test_series_of_another_length_than_the_groups_is_refused() -> None:
    with pytest.raises(PolicyTypeError, match="Series 'int8' does not fit the figure 'Size'") as caught:
        Bars("Size", "MB", ("all",), (Series("int8", (1.0, 2.0)),), "In words.")
    assert "Got values=2. Expected one value for each of the 1 groups." in str(caught.value)


def test_curve_with_more_numbers_than_places_is_refused() -> None:
    with pytest.raises(PolicyTypeError, match="Curve 'float8' does not fit the figure 'Loss'") as caught:
        Curves("Loss", "nats", "steps", (Curve("float8", (1.0,), (2.0, 3.0)),), "In words.")
    assert "Got x=1, y=2. Expected as many numbers as places, and one at least." in str(caught.value)
