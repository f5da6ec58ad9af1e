"""The HTML page: complete, on its own, and legible."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.planner.explain.answers import Choice, Decision, Explanation, Price, Shift
from graphaccel.planner.plan.prediction import Prediction, StageMemory
from graphaccel.report.charts import gantt_chart, memory_charts, pareto_chart, waterfall_chart
from graphaccel.report.facts import Facts, Measured, Point
from graphaccel.report.html import html_page
from graphaccel.report.scales import Scale, bytes_label, time_label

VOID = {"meta", "line", "circle", "rect", "path"}
WHY = Explanation(
    (
        Decision("data", "2", True, (Choice("4", "data 4", 0.2, 5 << 20, "slow <b>"),)),
        Decision("recompute", "none", False, ()),
    ),
    (Price("2x FLOP/s", 0.1, "data 2", 0.25), Price("-8 GiB", None, "", None)),
    (Shift("FLOP/s", 0.9, 0.012, "data 4"),),
)


class Page(HTMLParser):
    """Tags must be closed in order; counts elements by class, collects texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.classes += [value for name, value in attrs if name == "class" and value]
        if tag not in VOID or tag in ("rect", "circle", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.classes += [value for name, value in attrs if name == "class" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.titles.append(data)


@pytest.fixture
def whole(facts: Facts) -> Facts:
    measured = Measured(5, facts.prediction.seconds * 1.1, 0.01, 0.02, (), "2 cores")
    return replace(facts, explanation=WHY, measured=measured)


def test_page_is_well_formed_and_needs_nothing_else(whole: Facts) -> None:
    text = html_page(whole)
    page = Page(text)
    assert not {name for name, _ in page.attributes} & {"src", "href", "xlink:href", "srcset"}
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    assert len(text) < 400_000


def test_page_holds_every_action_and_candidate(whole: Facts) -> None:
    page = Page(html_page(whole))
    done = [e for e in whole.events if e.kind in ("forward", "backward")]
    bars = [c for c in page.classes if re.match(r"bar (forward|backward)", c)]
    assert len(bars) == len(done)
    dots = [c for c in page.classes if c.startswith("dot ")]
    assert len(dots) >= len(whole.candidates)
    for point in whole.candidates:
        assert any(title.startswith(f"{point.name}\n") for title in page.titles)


def test_page_says_what_the_text_says(whole: Facts) -> None:
    text = html_page(whole)
    assert "PLAN    " in text
    assert "measured" in text
    assert "slow &lt;b&gt;" in text
    assert "nothing fits" in text
    assert "1.2 % slower" in text or "1.2 %" in text
    assert "the only value possible" in text


def test_page_without_extras(facts: Facts) -> None:
    text = html_page(replace(facts, memory=(), candidates=()))
    Page(text)
    assert 'id="memory"' not in text
    assert 'id="candidates"' not in text


def test_memory_pictures_reach_the_peak_and_show_the_budget(facts: Facts) -> None:
    (chart, *_), note = memory_charts(facts)
    assert note == ""
    assert chart.top <= chart.peak_y <= chart.bottom
    assert chart.left <= chart.peak_x <= chart.right
    heights = [float(y) for area in chart.areas for y in re.findall(r",([\d.]+)", area.path)]
    assert min(heights) == chart.peak_y
    assert max(heights) == chart.bottom
    assert chart.budget is None
    assert "above this picture" in chart.budget_label
    tight = replace(facts.cluster.device, memory=max(m.peak for m in facts.prediction.memory))
    (chart, *_), _ = memory_charts(replace(facts, cluster=replace(facts.cluster, device=tight)))
    assert chart.budget is not None
    assert chart.top <= chart.budget <= chart.peak_y


def test_many_ranks_are_left_out_and_said_to_be(facts: Facts) -> None:
    rows = tuple(replace(facts.memory[0], rank=rank) for rank in range(9))
    charts, note = memory_charts(replace(facts, memory=rows))
    assert len(charts) == 6
    assert note == "the 6 fullest of 9 pipeline ranks"
    events = tuple(replace(facts.events[0], rank=rank) for rank in range(40))
    chart = gantt_chart(replace(facts, events=events))
    assert chart.note == "the first 24 of 40 ranks"
    assert len(chart.rows) == 24


def test_waterfall_adds_up(facts: Facts) -> None:
    *terms, step = waterfall_chart(facts).rows
    for before, after in pairwise(terms):
        assert after.x == pytest.approx(before.x + before.width, abs=1.1)
    assert step.x + step.width == pytest.approx(terms[-1].x + terms[-1].width, abs=1.1)


def test_candidates_that_do_not_fit_are_right_of_the_budget(facts: Facts) -> None:
    device = replace(facts.cluster.device, memory=1000)
    points = (
        Point("small", 3.0, 500, True, True, False),
        Point("chosen", 2.0, 900, True, True, True),
        Point("big", 1.0, 1500, False, True, False),
        Point("bad", 4.0, 950, True, False, False),
    )
    chart = pareto_chart(
        replace(facts, candidates=points, cluster=replace(facts.cluster, device=device))
    )
    assert chart is not None
    assert chart.budget is not None
    kinds = {dot.title.split("\n")[0]: dot for dot in chart.dots}
    assert [kinds[n].kind for n in ("small", "chosen", "big", "bad")] == [
        "front",
        "chosen",
        "too big",
        "fits",
    ]
    assert kinds["chosen"].x < chart.budget < kinds["big"].x
    assert kinds["big"].y > kinds["chosen"].y > kinds["small"].y  # faster is lower
    assert chart.front.count("H") == 2
    assert chart.note.startswith("4 candidates, 3 of them fit")


@given(
    st.floats(1e-9, 1e6),
    st.floats(1.001, 1e4),
    st.booleans(),
    st.integers(3, 9),
)
def test_ticks_are_round_in_range_and_apart(
    low: float, ratio: float, log: bool, count: int
) -> None:
    scale = Scale(low, low * ratio, 0, 900, log=log)
    ticks = scale.ticks(count, lambda value: f"{value:.9g}")
    places = [tick.at for tick in ticks]
    assert places == sorted(places)
    assert all(-0.1 <= place <= 900.1 for place in places)
    assert len({tick.label for tick in ticks}) == len(ticks)
    if not log:
        assert len(ticks) <= count + 1
        assert all(b - a > 900 / count / 2.6 for a, b in pairwise(places))


def test_labels_of_axes() -> None:
    assert [time_label(0.02)(x) for x in (0, 0.005, 0.01)] == ["0", "5 ms", "10 ms"]
    assert [time_label(3.0)(x) for x in (0.5, 2)] == ["0.5 s", "2 s"]
    label, unit = bytes_label(3 << 30)
    assert (label(1.5 * 2**30), unit) == ("1.5 GiB", 2**30)


def test_a_peak_without_tensors_is_drawn(facts: Facts) -> None:
    memory = (StageMemory(0, 0, 0, 0, 0, 0, 10, 10, "nothing"),)
    plan = replace(facts.plan, prediction=Prediction(0.0, 0, 0, 0, 0, memory))
    Page(html_page(replace(facts, plan=plan, memory=(), candidates=(), events=())))
