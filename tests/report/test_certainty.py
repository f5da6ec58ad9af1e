"""What reports say of how far a prediction is to be trusted."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster, OpTime, StepTime
from graphaccel.planner.cluster.detect import DetectedDevice, detected_cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Precision
from graphaccel.report.certainty import (
    Calibration,
    calibration_of,
    error_text,
    reserve_of,
    reserve_text,
    room,
)
from graphaccel.report.explanation import answer_lines
from graphaccel.report.facts import Facts
from graphaccel.report.html import html_page
from graphaccel.report.text import facts_text

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_room_on_a_device() -> None:
    where = cluster("h100-80gb", 8, memory=80 * GIB)  # 1.5 GiB of context, 7 % fragmentation
    assert room(60 * GIB, where).reason == "also where the allocator wastes 7%"
    likely = room(75 * GIB, where)
    assert (likely.verdict, likely.reason) == (
        "likely",
        "where the allocator wastes 3.5% or less, not 7%",
    )
    risky = room(78 * GIB, where)
    assert risky.verdict == "risky"
    assert risky.reason == "tensors alone take 78.0 GiB, the context leaves 78.5 GiB"
    assert room(81 * GIB, where).reason == "tensors alone are 1.0 GiB more than the device has"


def test_where_rates_are_from() -> None:
    known = cluster("h100-80gb", 16, memory=40 * GIB)
    said = calibration_of(known)
    assert (said.level, said.source) == (0, "catalogue figures, not measured")
    assert calibration_of(cluster("v100-32gb", 4)) == replace(said, error=None, error_of="")
    other = replace(known, device=replace(known.device, memory_bandwidth=1e12))
    given = Calibration(0, "figures given for the cluster, not measured here")
    assert calibration_of(other) == given
    found = detected_cluster(DetectedDevice("NVIDIA H100 PCIe", 80 * GIB, 114, (9, 0)), 2)
    assert calibration_of(found) == Calibration(
        0, "rates of h100-80gb by the processors of NVIDIA H100 PCIe"
    )
    linked = replace(known, links=(replace(known.links[0], bandwidth=1e9), known.links[1]))
    assert calibration_of(linked) == given
    measured = replace(known, device=replace(known.device, measured=(OpTime("aten.add"),) * 3))
    said = calibration_of(measured)
    assert (said.level, said.source, said.calls) == (1, "3 calls measured on this kind", 3)


def test_errors_to_expect_are_those_of_the_results() -> None:
    """The package has figures of benchmarks/results in it: when those change, it has to as well."""
    known = cluster("h100-80gb", 8)
    left_out = json.loads((RESULTS / "validation.json").read_text())["fit"]["sources"]
    for eight, precision in ((False, Precision()), (True, PRECISIONS["fp8"])):
        errors = [
            one["left_out"]
            for name, one in left_out.items()
            if name.endswith((" in 8 bits", " in 4 bits")) == eight and one["left_out"] is not None
        ]
        assert calibration_of(known, precision).error == round(fmean(errors), 2)
    predicted = json.loads((RESULTS / "predicted.json").read_text())
    measured = replace(known, device=replace(known.device, measured=(OpTime("aten.add"),)))
    assert calibration_of(measured).error == round(predicted["mean_error"], 2)
    rows = [row for row in predicted["rows"] if row["pins"]]
    pairs = [
        (one["measured"] / one["predicted"], other)
        for one in rows
        for other in rows
        if one is not other
        and (one["model"], one["processes"]) == (other["model"], other["processes"])
    ]
    errors = [abs(by * o["predicted"] / o["measured"] - 1) for by, o in pairs]
    step = StepTime("key", "gpt", "fp32", "data 1", 1, 1.0, 0.0, 0.1, 1.0, 0.1)
    assert calibration_of(replace(known, refined_by=(step,))).error == round(fmean(errors), 2)


def test_an_error_is_said_only_of_what_it_was_found_on() -> None:
    known = cluster("h100-80gb", 8)
    assert error_text(calibration_of(known)) == (
        "error to expect: not known for graphaccel's own steps; 7% for published runs of other "
        "systems"
    )
    measured = replace(known, device=replace(known.device, measured=(OpTime("aten.add"),)))
    assert error_text(calibration_of(measured)) == (
        "error to expect: 7%, the mean over plans of small models on CPU processes"
    )


def test_the_reserve_is_a_quantile_of_published_runs() -> None:
    with (RESULTS.parent / "validation/data/validation_rows.csv").open() as file:
        told = [
            float(said[1]) / float(row["measured_mem_GB"]) - 1
            for row in csv.DictReader(file)
            if (said := re.search(r"reserved ([0-9.]+)", row["notes"]))
        ]
    assert len(told) == 27
    reserve = reserve_of(cluster("h100-80gb", 8))
    assert reserve.share == round(float(np.quantile(told, 0.9)), 2)
    assert reserve_text(reserve) == ("7% fragmentation (quantile 0.9 of 27 published runs on B200)")


def test_reports_say_both(facts: Facts) -> None:
    assert facts.room is not None
    assert facts.calibration is not None
    text = facts_text(facts)
    said = f"{facts.room.verdict}: {facts.room.reason}"
    assert f" free; {said}\n" in text
    assert f"\n  calibration level 0: {facts.calibration.source}\n" in text
    assert facts.reserve is not None
    assert "\n  error to expect: not known, no run on such a device was compared\n" in text
    again = Facts.from_json(facts.to_json())
    assert (again.room, again.calibration) == (facts.room, facts.calibration)
    page = html_page(facts).split('<section id="text">')[0]
    assert said in page
    assert f"{facts.calibration.source} (calibration level 0)" in page


@pytest.mark.parametrize(("part", "verdict"), [(0.97, "likely"), (1.5, "impossible")])
def test_a_plan_that_does_not_fit_may_run_all_the_same(
    facts: Facts, made_up: Callable[..., Cluster], part: float, verdict: str
) -> None:
    from graphaccel.planner.explain.answers import Answer

    where = made_up(4)
    tensors = int(where.device.memory * part)
    other = int(tensors * where.fragmentation)
    parts = {"activation": tensors, "other": other}
    answer = Answer(
        "data=1",
        "does not fit",
        "does not fit by much",
        "data 1",
        1.0,
        {},
        {},
        tensors + other,
        0,
        parts,
    )
    assert f"  {verdict} to run all the same: " in "\n".join(
        answer_lines(answer, facts.plan, where)
    )
