"""Programs of stages that hold many layers are made of few of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.passes.activations import offload_activations
from graphaccel.passes.replication import replicated
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.candidate_cuts import candidate_cuts
from graphaccel.planner.profile.profile import Profile
from tests.passes.steps.test_repeat_layers import assert_same, captured, whole

LAYERS = 20
ALL = tuple(f"blocks.{n}" for n in range(LAYERS))


@pytest.fixture
def deep() -> StepGraph:
    return captured(LAYERS)


def cut(step: StepGraph, *shares: float) -> tuple[str, ...]:
    """Where stages may end that have about so much of the step before them."""
    profile = Profile(step)
    places = candidate_cuts(profile, profile.sized(1, cluster("h100-80gb", 2).device)).positions
    return tuple(profile.names[places[int(share * len(places))]] for share in shares)


PLANS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "shards": ({"data": 2, "zero": 3, "accumulation": "shards", "recompute": ALL}, (0.5,)),
    "held": (
        {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "recompute": ALL[:13]},
        (0.4,),
    ),
    "three": ({"data": 2, "zero": 3}, (0.35, 0.7)),
    "parts": ({"data": 2, "tensor": 2, "zero": 3, "scatter_sends": True}, (0.5,)),
    "sums": ({"data": 2, "context": 2, "zero": 3, "recompute": ALL}, ()),
    "buckets": ({"data": 2}, (0.45,)),
    "away": ({"offload": ("activations",), "recompute": ALL}, ()),
    "away in shards": ({"data": 2, "zero": 3, "offload": ("activations",)}, (0.5,)),
    "parameters away": ({"offload": ("optimizer", "parameters"), "recompute": ALL}, (0.5,)),
    "their shards away": ({"data": 2, "zero": 3, "offload": ("optimizer", "parameters")}, ()),
}

# A block copies from the host what the block after next gathers: no neighbour of a repeated layer.
TWO_AHEAD = ("their shards away",)


@pytest.mark.parametrize("name", PLANS)
def test_programs_of_stages_are_those_of_all_layers(
    name: str, deep: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, shares = PLANS[name]
    cuts = cut(deep, *shares)
    devices = math.prod(options.get(axis, 1) for axis in ("data", "tensor", "context"))
    devices *= len(cuts) + 1
    plan = Plan(devices, microbatches=3, batch=12, pipeline=len(cuts) + 1, cuts=cuts, **options)
    repeated: list[int] = []
    real = replicated.check_messages

    def noting(programs):  # type: ignore[no-untyped-def]
        real(programs)
        repeated.append(len(programs))

    monkeypatch.setattr(replicated, "check_messages", noting)
    monkeypatch.setattr(replicated, "is_less_work", lambda *_: True)
    monkeypatch.setattr(offload_activations, "LARGE", 1)
    made = build(deep, plan, sizes=deep.sizes)
    if name in TWO_AHEAD:
        assert not repeated, "made of few layers: take it out of TWO_AHEAD"
    else:
        assert repeated == [len(cuts) + 1], "all layers were rewritten"
    assert_same(made, build(whole(deep), plan, sizes=deep.sizes), plan)
