"""No plan that can be pinned by hand is faster than the one that is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from graphaccel.errors import GraphAccelError
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.search import branch_and_bound as solving
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.reasons import seconds
from graphaccel.planner.search.solve import Problem

CHOICES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4),
    "context": (1, 2),
    "pipeline": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2, 4, 8),
    "interleave": (1, 2),
    "recompute": ("none", "all"),
}
DRAWN = 12


def slow(cluster: Cluster) -> Cluster:
    """A thousandth of the rates: steps of seconds, of which a millisecond decides nothing."""
    device = replace(
        cluster.device,
        peak_flops={dtype: rate / 1000 for dtype, rate in cluster.device.peak_flops.items()},
        memory_bandwidth=cluster.device.memory_bandwidth / 1000,
        launch_seconds=cluster.device.launch_seconds * 1000,
    )
    links = (
        replace(x, bandwidth=x.bandwidth / 1000, latency_seconds=x.latency_seconds * 1000)
        for x in cluster.links
    )
    return replace(cluster, device=device, links=tuple(links))


def drawn(random: Random) -> Pins:
    names = random.sample(list(CHOICES), random.randint(1, 3))
    return Pins(**{name: random.choice(CHOICES[name]) for name in names})


@pytest.mark.parametrize("many", [solving.MANY, 0])
@pytest.mark.parametrize("kib", [400, 4000])
def test_no_pins_give_a_faster_plan(
    many: int,
    kib: int,
    profiles: Layouts,
    made_up: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where only the most promising candidates are solved."""
    monkeypatch.setattr(solving, "MANY", many)
    problem = Problem(profiles, slow(made_up(8, kib)), 8, Limits())
    chosen, random, fitting = solve_all(problem, Pins(), 16).fitting[0], Random(kib), 0
    for _ in range(DRAWN):
        pins = drawn(random)
        try:
            found = solve_all(problem, pins, 16).fitting
        except GraphAccelError:  # pins that contradict each other, or the batch
            continue
        fitting += bool(found)
        for plan in found[:1]:
            assert seconds(chosen) <= seconds(plan) + 1e-3, (pins.names, plan_name(plan))
    assert fitting > DRAWN // 4
