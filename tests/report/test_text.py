"""Reports, compared as text with tests/golden (`--update-golden` rewrites what is there)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.search.search import search
from graphaccel.report.facts import fold
from graphaccel.report.format import seconds_text, shortened
from graphaccel.report.text import plan_report

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]
Golden = Callable[[str, str], None]

CASES = {
    "gpt-pipeline": (
        "gpt",
        4,
        16 * 1024,
        {"data": 2, "pipeline": 2, "interleave": 1, "microbatches": 4},
    ),
    "gpt-order": (
        "gpt",
        8,
        16 * 1024,
        {"order": ("data", "pipeline"), "data": 4, "pipeline": 2, "schedule": "1f1b", "zero": 0},
    ),
    "gpt-tight": ("gpt", 2, 1000, {}),
    "t5-interleaved": ("t5", 2, 16 * 1024, {"pipeline": 2, "interleave": 2, "microbatches": 4}),
    "vit-one-device": ("vit", 1, 16 * 1024, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_report(captured: Captured, made_up: MadeUp, golden: Golden, case: str) -> None:
    name, count, kib, pins = CASES[case]
    step, cluster = captured(name), made_up(count, kib)
    plan = search(step, cluster, pins=pins, optimizer_bytes=8)
    text = plan_report(
        plan, step, cluster, model_name=name, assumed="AdamW, fp32; cluster not probed"
    )
    assert max(map(len, text.splitlines())) <= 110
    golden(f"report-{case}", text)


def test_what_recomputation_costs_and_would_spare(captured: Captured, made_up: MadeUp) -> None:
    step = captured("gpt")

    def report(kib: int, **pins: Any) -> str:
        cluster = made_up(1, kib)
        plan = search(step, cluster, pins={"microbatches": 1, **pins}, optimizer_bytes=8)
        return plan_report(plan, step, cluster, model_name="gpt", assumed="")

    assert "memory does not need it" in report(16 * 1024, recompute="all")
    assert "MiB per device it would not be needed" in report(1700)
    assert "recomput" not in report(16 * 1024)


def test_a_plan_without_prediction_has_no_report(captured: Captured, made_up: MadeUp) -> None:
    step, cluster = captured("gpt"), made_up(1)
    plan = replace(search(step, cluster, pins={}, optimizer_bytes=8), prediction=None)
    with pytest.raises(ValueError, match="not predicted"):
        plan_report(plan, step, cluster, model_name="gpt", assumed="")


def test_names_are_folded() -> None:
    names = ["wte.weight", *(f"h.{i}.{p}.weight" for i in range(4) for p in ("a", "b")), "ln.bias"]
    assert fold(names) == "wte, h.0-3, ln"
    assert fold(["h.1", "h.2", "h.5"], parameters=False) == "h.1-2, h.5"
    assert fold(["scale"]) == "scale"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (31e-6, "31.0 us"),
        (0.00123, "1.23 ms"),
        (0.412, "412 ms"),
        (1.25, "1.25 s"),
        (99.96, "100 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_many_lines_are_shortened() -> None:
    lines = [f"stage {n}" for n in range(128)]
    assert shortened(lines[:20]) == lines[:20]
    found = shortened(lines, keep=(60, 122))
    assert found == [*lines[:8], "  ... 52 more", lines[60], "  ... 61 more", *lines[122:]]
