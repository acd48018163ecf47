from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from narrowcast.report import Bars, Curve, Curves, Figure, Series
from narrowcast.report.plots import DARK, LIGHT, svg
from tests.report.samples import BARS, CURVES, HISTOGRAM

MANY = Bars(
    "Error by layer", "relative error", tuple(f"layer/{i}" for i in range(30)), (Series("own", (0.1,) * 30),), "-"
)


@pytest.mark.parametrize("figure", [BARS, HISTOGRAM, MANY, CURVES], ids=lambda figure: figure.title)
def test_figure_is_an_svg_picture(figure: Figure) -> None:
    assert ElementTree.fromstring(svg(figure, LIGHT)).tag == "{http://www.w3.org/2000/svg}svg"


def test_picture_takes_the_colours_of_its_theme() -> None:
    assert LIGHT.series[1] in svg(BARS, LIGHT)
    assert DARK.series[1] in svg(BARS, DARK)
    assert LIGHT.series[1] not in svg(BARS, DARK)


def test_same_figure_gives_the_same_bytes() -> None:
    assert svg(HISTOGRAM, DARK) == svg(HISTOGRAM, DARK)


def test_picture_grows_with_its_groups() -> None:
    height = float(ElementTree.fromstring(svg(MANY, LIGHT)).attrib["height"].removesuffix("pt"))
    assert height > float(ElementTree.fromstring(svg(BARS, LIGHT)).attrib["height"].removesuffix("pt"))


def test_legend_names_every_curve() -> None:
    assert all(f">{curve.name}<" in svg(CURVES, LIGHT) for curve in CURVES.curves)


def test_numbers_not_above_zero_are_left_out_of_a_logarithmic_axis() -> None:
    curves = (Curve("scale", (0.0, 1.0, 2.0), (0.0, 4.0, 8.0)),)
    figure = Curves("Scale", "scale", "steps", curves, "-", is_logarithmic=True)
    assert ElementTree.fromstring(svg(figure, LIGHT)).tag.endswith("svg")


def test_drawing_changes_no_setting_of_matplotlib() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    svg(BARS, DARK)
    assert dict(matplotlib.rcParams) == before


def test_drawing_starts_no_pyplot() -> None:
    code = (
        "import sys; from tests.report.samples import BARS; from narrowcast.report.plots import LIGHT, svg"
        "; svg(BARS, LIGHT); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
