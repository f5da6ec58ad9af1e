"""The place of published meshes among all that our search has, on the same devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.shared.ranks import Meshes
from benchmarks.validation.memory import STATE_BYTES
from benchmarks.validation.predict import Predictor, cluster_of, real_cluster
from benchmarks.validation.rows import Run
from graphaccel.errors import GraphAccelError
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.search.search import Conditions, search
from graphaccel.planner.search.solve import Problem


def fastest(runs: Sequence[Run]) -> list[Run]:
    """Of each source, model, number and kind of devices the run with the least seconds for a
    sequence; small models first."""
    best: dict[tuple[object, ...], Run] = {}
    for run in runs:
        key = run.source, run.name, run.shape, run.devices, run.device, run.products
        if key not in best or _each(run) < _each(best[key]):
            best[key] = run
    return sorted(best.values(), key=lambda r: (r.layers, r.devices, str(r.shape), r.device))


def _each(run: Run) -> float:
    return run.seconds / run.batch


def ranks(runs: Sequence[Run], seconds: float) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Each run with the plan that has its mesh and else what the planner chooses, what that is
    predicted to take, and its place (`benchmarks.shared.ranks`), until so many seconds are over.
    Kernels and rates are those of its system; nothing is kept on the host."""
    end = time.monotonic() + seconds
    predictor = Predictor(max((run.devices for run in runs), default=1))
    for run in runs:
        if time.monotonic() > end:
            return
        where = cluster_of(run, run.devices, other_meshes=True)
        memory = real_cluster(run, run.devices).device.memory
        where = replace(where, device=replace(where.device, memory=memory))
        captured = predictor.captured(run, run.system.fusions, other_meshes=True)
        yield run, _ranked(run, Problem(captured, where, STATE_BYTES, Limits()))


def _ranked(run: Run, problem: Problem) -> dict[str, Any]:
    mesh = {
        "data": run.data // run.expert,
        **{axis: getattr(run, axis) for axis in ("pipeline", "tensor", "context", "expert")},
        "offload": "none",
    }
    try:
        theirs = search(
            problem.profile.step, problem.cluster, pins=mesh, optimizer_bytes=STATE_BYTES,
            profiles=problem.layouts, conditions=Conditions(batch=run.batch),
        )  # fmt: skip
    except GraphAccelError as error:
        return {"refused": error.message().sentence}
    assert theirs.prediction is not None
    decided = Pins(offload=())
    base = base_plan(decided, run.devices, run.batch, "", "", "loss")
    meshes = Meshes(problem, decided, base, run.batch)
    seconds = theirs.prediction.seconds
    return {"plan": theirs.name, "predicted_seconds": seconds, **meshes.place(theirs)}
