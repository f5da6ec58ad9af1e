"""examples/gpt2/plot.py: curves as text and as SVG."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plot(gpt2):
    return gpt2("plot")


def test_panels_stand_side_by_side_on_the_same_axes(plot) -> None:
    text = plot.side_by_side({"falls": [3, 2, 1], "stays": [2, 2, 2]}, width=11, height=3)
    assert text.splitlines() == [
        "         falls        stays",
        "  3.000 |*          ||           |",
        "  2.000 |     *     ||*    *    *|",
        "  1.000 |          *||           |",
        "         0    step 2  0    step 2",
    ]


def test_a_constant_curve_lies_in_the_middle(plot) -> None:
    lines = plot.side_by_side({"one": [4.0]}, width=3, height=3).splitlines()
    assert lines[1:4] == ["  4.500 |   |", "  4.000 |*  |", "  3.500 |   |"]


def test_the_svg_holds_a_point_for_each_step_and_a_name_for_each_curve(plot) -> None:
    curves = {"4 processes": [3.0, 2.0, math.nan, 1.0], "1 < 2 & done": [3.0, 2.5, 2.0, 1.5]}
    root = ElementTree.fromstring(plot.svg(curves, "loss & more"))
    lines = root.findall(f"{SPACE}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 4]
    texts = [text.text for text in root.findall(f"{SPACE}text")]
    assert {"loss & more", "4 processes", "1 < 2 & done", "step", "3.00", "1.00"} <= set(texts)
    first = lines[0].attrib["points"].split()
    assert (first[0], first[-1]) == ("60.0,40.0", "700.0,360.0")  # highest left, lowest right


def test_the_largest_difference_is_found_with_its_step(plot) -> None:
    assert plot.largest_difference([1.0, 2.0, 3.0], [1.0, 2.5, 2.75]) == (1, 0.5)
    assert plot.largest_difference([1.0, 2.0], [1.0, 2.0]) == (0, 0.0)


def test_nan_is_the_largest_difference(plot) -> None:
    step, difference = plot.largest_difference([1.0, math.nan, 3.0], [9.0, 2.0, 3.0])
    assert step == 1
    assert math.isnan(difference)
    assert not difference <= 1e-3  # how demo.py asks


@pytest.mark.parametrize("other", [[], [1.0]])
def test_curves_of_different_length_are_not_compared(plot, other: list[float]) -> None:
    with pytest.raises(ValueError, match=f"curves of 2 and {len(other)} steps"):
        plot.largest_difference([1.0, 2.0], other)


def test_nothing_finite_is_an_error(plot) -> None:
    with pytest.raises(ValueError, match="no finite value to plot"):
        plot.side_by_side({"lost": [math.nan, math.inf]})


def test_the_picture_in_the_readme_is_that_of_its_numbers(gpt2) -> None:
    plot, demo = gpt2("plot"), gpt2("demo")
    curves = json.loads((ROOT / "docs" / "pictures" / "curve.json").read_text(encoding="utf-8"))
    many, one = curves.values()
    assert plot.largest_difference(many, one)[1] < demo.TOLERANCE
    assert plot.svg(curves, demo.TITLE) == (ROOT / "docs" / "pictures" / "curve.svg").read_text(
        "utf-8"
    )
