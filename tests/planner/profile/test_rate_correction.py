"""A measured step corrects a cluster's rates: seconds, order of plans, bounds, and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadCluster
from graphaccel.planner.cluster.cluster import Cluster, StepTime
from graphaccel.planner.cluster.cluster_file import read_cluster, write_cluster
from graphaccel.planner.estimate.estimate import predict_seconds
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.rate_correction import (
    model_key,
    refined,
    scales,
    step_time,
    with_step,
)
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.branch_and_bound import seconds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import Layout, meshes_of
from graphaccel.planner.search.solve import with_cuts_and_blocks
from graphaccel.report.certainty import calibration_of
from tests.planner.estimate.test_footprint import problem_of

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]
STATE = 8
DATA = Plan(4, data=4, batch=8)
OTHERS = (
    Plan(4, data=4, batch=8, zero=1),
    Plan(4, data=4, batch=8, zero=3),
    Plan(4, data=2, pipeline=2, batch=8, microbatches=2, cuts=("add_4",)),
    Plan(4, data=2, pipeline=2, batch=8, microbatches=4, cuts=("add_4",)),
    Plan(4, data=4, batch=8, microbatches=2),
)


def _wrong(real: Cluster) -> Cluster:
    """Figures that say too much of everything: 3 times the FLOPs, half the hops, ..."""
    device = replace(
        real.device,
        peak_flops={dtype: 3 * rate for dtype, rate in real.device.peak_flops.items()},
        memory_bandwidth=2.5 * real.device.memory_bandwidth,
    )
    links = tuple(replace(link, bandwidth=2 * link.bandwidth) for link in real.links)
    return replace(real, device=device, links=links)


def _run(profile: Profile, plan: Plan, real: Cluster, guessed: Cluster) -> StepTime:
    """What a file is told of a plan that takes what `real` says."""
    took = predict_seconds(profile, plan, real, STATE)
    said = predict_seconds(profile, plan, guessed, STATE)
    key = model_key(profile)
    return step_time(plan, said, key, "gpt", took.seconds, took.optimizer)


@pytest.mark.parametrize("plan", [DATA, OTHERS[0], OTHERS[2]], ids=plan_name)
def test_the_same_plan_is_predicted_as_it_ran(
    captured: Captured, made_up: MadeUp, plan: Plan
) -> None:
    profile, real = Profile(captured("gpt")), made_up(4)
    guessed = _wrong(real)
    ran = predict_seconds(profile, plan, real, STATE)
    assert predict_seconds(profile, plan, guessed, STATE).seconds < 0.6 * ran.seconds
    known = with_step(guessed, _run(profile, plan, real, guessed))
    again = predict_seconds(profile, plan, refined(known, model_key(profile), "fp32"), STATE)
    assert again.seconds == pytest.approx(ran.seconds, rel=0.01)


def test_other_plans_are_nearer_and_in_their_order(captured: Captured, made_up: MadeUp) -> None:
    profile, real = Profile(captured("gpt")), made_up(4)
    guessed = _wrong(real)
    known = with_step(guessed, _run(profile, DATA, real, guessed))
    corrected = refined(known, model_key(profile), "fp32")

    def times(where: Cluster) -> np.ndarray:
        return np.array([predict_seconds(profile, p, where, STATE).seconds for p in OTHERS])

    off = np.abs(times(corrected) / times(real) - 1)
    assert off.mean() < 0.1
    assert off.max() < np.abs(times(guessed) / times(real) - 1).min()
    assert times(corrected).argsort().tolist() == times(real).argsort().tolist()


def test_two_steps_tell_computing_from_communication(captured: Captured, made_up: MadeUp) -> None:
    profile, real = Profile(captured("gpt")), made_up(4)
    guessed = _wrong(real)
    known = guessed
    for plan in (replace(DATA, devices=1, data=1), DATA):
        known = with_step(known, _run(profile, plan, real, guessed))
    by = scales(known.steps)
    assert by.compute > 2.4
    assert 1.7 < by.communication < 2.3


def test_a_step_without_communication_says_nothing_of_links(
    captured: Captured, made_up: MadeUp
) -> None:
    profile, real = Profile(captured("gpt")), made_up(4)
    alone, guessed = Plan(1, batch=8), _wrong(real)
    known = with_step(guessed, _run(profile, alone, real, guessed))
    corrected = refined(known, model_key(profile), "fp32")
    assert corrected.links == guessed.links
    assert corrected.device != guessed.device


def test_a_step_is_for_its_own_model_and_precision(captured: Captured, made_up: MadeUp) -> None:
    profile, real = Profile(captured("gpt")), made_up(4)
    guessed = _wrong(real)
    known = with_step(guessed, _run(profile, DATA, real, guessed))
    key = model_key(profile)
    assert refined(known, key, "bf16") is known
    assert refined(known, model_key(Profile(captured("vit"))), "fp32") is known
    once = refined(known, key, "fp32")
    assert refined(once, key, "fp32") is once
    assert with_step(known, replace(known.steps[0], took=1.0)).steps[0].took == 1.0
    assert len(with_step(known, replace(known.steps[0], devices=2)).steps) == 2


def test_no_bound_is_above_what_is_predicted(captured: Captured, made_up: MadeUp) -> None:
    step, real = captured("gpt"), made_up(4)
    profile, guessed = Profile(step), _wrong(real)
    known = with_step(guessed, _run(profile, DATA, real, guessed))
    known = with_step(known, _run(profile, replace(DATA, devices=1, data=1), real, guessed))
    problem = problem_of(step, refined(known, model_key(profile), "fp32"))
    pins = Pins(recompute="none")
    base = base_plan(pins, 4, 8, step.fingerprint, "made-up", "loss")
    meshes = [m for m in meshes_of(problem, pins, 8, Layout()) if m.pipeline * m.interleave < 5]
    least = Bounds(problem, base).seconds(columns(meshes, 8)).tolist()
    assert len(meshes) > 10
    for mesh, bound in zip(meshes, least, strict=True):
        predicted = seconds(with_cuts_and_blocks(problem, mesh.on(base), "none", None))
        assert bound <= predicted * (1 + 1e-9), mesh


def test_the_file(captured: Captured, made_up: MadeUp, tmp_path: Path) -> None:
    profile, real = Profile(captured("gpt")), made_up(4)
    file = tmp_path / "cluster.json"
    known = with_step(_wrong(real), _run(profile, DATA, real, _wrong(real)))
    write_cluster(known, file)
    assert read_cluster(file) == known
    corrected = refined(known, model_key(profile), "fp32")
    said = calibration_of(corrected)
    assert (said.level, said.steps) == (2, 1)  # and how far off: tests/report/test_certainty.py
    write_cluster(corrected, file)
    assert read_cluster(file).refined_by == ()
    data = real.to_json()
    del data["schema"]  # as files were before
    file.write_text(json.dumps(data))
    assert read_cluster(file) == real
    file.write_text(json.dumps({**data, "schema": 2, "steps": [{**_row(known), "took": 0}, 3]}))
    with pytest.raises(BadCluster) as caught:
        read_cluster(file)
    assert caught.value.problems == (
        "schema is 2; this version reads 1",
        "steps[0].took is 0: it is above 0",
        "steps[1] is to be an object",
    )


def _row(known: Cluster) -> dict[str, object]:
    return known.to_json()["steps"][0]
