"""Every plan of a small problem, by plain loops that know nothing of the search.

What the documents say a plan may be: sizes of the axes that multiply to the devices, schedules,
levels of ZeRO with their choices, microbatches, every set of cuts among the candidate positions and
every set of blocks to compute again, each in any of its ways
(`tests/passes/steps/test_selective_recompute.py` tries what they are). No bound, no order and no
choice of the planner is used; what each plan takes is asked of its cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb, inf
from typing import Any

from graphaccel.capture.symbols import SEQUENCE
from graphaccel.errors import BadPin
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.planner.estimate.estimate import predict_seconds
from graphaccel.planner.estimate.estimated_memory import predict_memory
from graphaccel.planner.plan.pins import RESHARDS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.candidate_cuts import candidate_cuts
from graphaccel.planner.search.recompute import block_options
from graphaccel.planner.search.solve import Problem

WORTH, RESOLVED = 0.03, 1e-3
"""Of a step, and at most in seconds: how much a plan must save that shards what nobody asked to
shard (`planner.search.search`)."""


@dataclass(frozen=True)
class Found:
    """A plan without cuts and blocks of its own is a mesh; with them, what it takes: weighed: its
    seconds, more where it shards what was not asked for."""

    plan: Plan
    mesh: Plan
    seconds: float
    closed: float
    weighed: float
    peak: int


def meshes(problem: Problem, pins: Mapping[str, Any], batch: int) -> Iterator[Plan]:
    """Every plan without its cuts and its recomputed blocks."""
    count = problem.cluster.count
    for tensor, context in product(range(1, count + 1), repeat=2):
        if count % (tensor * context) or not _shardable(problem, tensor, context):
            continue
        for pipeline in range(1, count // (tensor * context) + 1):
            data, rest = divmod(count // (tensor * context), pipeline)
            if rest or batch % data:
                continue
            for microbatches in range(1, batch // data + 1):
                if batch // data % microbatches:
                    continue
                axes = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
                for order, more in product(
                    _orders(problem, pins, pipeline, data),
                    _ways(problem, pins, pipeline, data, microbatches),
                ):
                    plan = Plan(count, batch=batch, microbatches=microbatches, **axes, **more,
                                order=order)  # fmt: skip
                    if all(_decided(plan, name) == value for name, value in pins.items()
                           if name != "recompute"):  # fmt: skip
                        yield plan


def _orders(
    problem: Problem, pins: Mapping[str, Any], pipeline: int, data: int
) -> list[tuple[str, ...]]:
    """Pipeline or data outermost, where there are both, and links of which some reach further."""
    if "order" in pins:
        return [pins["order"]]
    inner = ("expert", "context", "tensor")
    found = [("pipeline", "data", *inner)]
    if len(problem.cluster.links) > 1 and pipeline > 1 and data > 1:
        found.append(("data", "pipeline", *inner))
    return found


def _decided(plan: Plan, name: str) -> Any:
    return plan.shards if name == "shard_size" and plan.zero else getattr(plan, name)


def _shardable(problem: Problem, tensor: int, context: int) -> bool:
    """Whether the model has something for these axes to share, and the graph can be made."""
    if tensor == context == 1:
        return True
    if not problem.layouts.offered or tensor > problem.cluster.links[0].size:
        return False
    heads, tokens = _heads(problem), problem.profile.step.sizes[SEQUENCE]
    if heads % tensor or tokens % context:
        return False
    try:
        problem.layouts.of(Plan(tensor * context, tensor=tensor, context=context))
    except BadPin:
        return False
    return True


def _heads(problem: Problem) -> int:
    (heads,) = {
        int(n.args[0].meta["val"].shape[1])
        for n, _ in distinct_nodes(problem.profile.step.forward.graph)
        if "scaled_dot_product" in str(n.target)
    }
    return heads


def _ways(
    problem: Problem, pins: Mapping[str, Any], pipeline: int, data: int, microbatches: int
) -> Iterator[dict[str, Any]]:
    """Stages on a rank, schedules, and what ZeRO does."""
    for interleave in (1, 2, 4):
        if interleave > 1 and pipeline == 1:
            continue
        for zero in range(4):
            if (zero and data == 1) or (zero > _least_zero(pins) and not problem.shardable):
                continue
            schedules: Sequence[str] = ("interleaved",)
            if interleave == 1:
                several = ("gpipe", "zero_bubble") if zero < 2 else ("gpipe",)
                schedules = ("1f1b", *several) if pipeline > 1 else ("1f1b",)
            agains: Sequence[str] = RESHARDS if zero == 3 else ("always",)
            if pins.get("zero") == 3 and "reshard_after_forward" not in pins:
                agains = ("always",)  # who asks for it wants the memory
            kinds = ("whole", "shards") if zero > 1 else ("whole",)
            parts: Sequence[int] = (0,)
            if zero and ("zero" not in pins or "shard_size" in pins):
                parts = (0, *(n for n in range(2, data) if data % n == 0))
            for schedule, again, kind, shard in product(schedules, agains, kinds, parts):
                if kind == "shards" and microbatches == 1 and "accumulation" not in pins:
                    continue  # the same as whole
                yield {
                    "interleave": interleave, "zero": zero, "schedule": schedule,
                    "reshard_after_forward": again, "accumulation": kind, "shard_size": shard,
                }  # fmt: skip


def how_many(problem: Problem, pins: Mapping[str, Any], batch: int) -> int:
    """How many plans there are."""
    return sum(
        comb(len(_positions(problem, mesh)), mesh.stages - 1) * len(_sets(problem, pins, mesh))
        for mesh in meshes(problem, pins, batch)
    )


def every_plan(
    problem: Problem,
    pins: Mapping[str, Any],
    batch: int,
    cuts_of: Callable[[Plan], Iterable[tuple[str, ...]]],
    known: dict[Plan, Found],
) -> list[Found]:
    """All of them whose cuts are among those of `cuts_of`, with what they take; `known`: what was
    found before, memory aside."""
    return [
        _once(
            known,
            problem,
            pins,
            mesh,
            replace(mesh, cuts=cuts, scatter_sends=parts).with_recomputed(blocks),
        )
        for mesh in meshes(problem, pins, batch)
        for cuts in cuts_of(mesh)
        for blocks in _sets(problem, pins, mesh)
        for parts in ((False, True) if mesh.tensor > 1 and mesh.pipeline > 1 else (False,))
    ]


def every_cut(problem: Problem) -> Callable[[Plan], Iterable[tuple[str, ...]]]:
    """As `cuts_of`: each set of as many cuts as a mesh asks for."""
    return lambda mesh: combinations(_positions(problem, mesh), mesh.stages - 1)


def _positions(problem: Problem, mesh: Plan) -> tuple[str, ...]:
    profile = problem.layouts.of(mesh)
    return tuple(
        profile.names[place] for place in candidate_cuts(profile, problem.sized(mesh)).positions
    )


def _sets(
    problem: Problem, pins: Mapping[str, Any], mesh: Plan
) -> list[dict[str, tuple[str, ...]]]:
    """Blocks that are computed again → what is saved of each."""
    names = problem.profile.block_names
    asked = pins.get("recompute")
    if asked is not None:
        whole = {"none": (), "all": names}[asked] if isinstance(asked, str) else asked
        return [dict.fromkeys(whole, ())]
    options = block_options(problem.layouts.of(mesh), problem.sized(mesh))
    return [
        {own.name: own.saved for own in chosen if own is not None}
        for chosen in product(*((None, *own) for own in options))
    ]


def _once(
    known: dict[Plan, Found], problem: Problem, pins: Mapping[str, Any], mesh: Plan, plan: Plan
) -> Found:
    if plan not in known:
        known[plan] = _found(problem, pins, mesh, plan)
    return known[plan]


def _found(problem: Problem, pins: Mapping[str, Any], mesh: Plan, plan: Plan) -> Found:
    profile, cluster = problem.layouts.of(plan), problem.cluster
    played, closed = (
        predict_seconds(
            profile, plan, cluster, problem.optimizer_bytes, simulated=simulated
        ).seconds
        for simulated in (True, False)
    )
    memory = predict_memory(profile, plan, cluster, problem.optimizer_bytes, problem.step_memory)
    more = 0.0 if _asked_for(pins, plan) else min(WORTH * played, RESOLVED)
    return Found(plan, mesh, played, closed, played + more, max(m.peak for m in memory))


def _asked_for(pins: Mapping[str, Any], plan: Plan) -> bool:
    """Whether nothing is sharded that was not asked for."""
    axes = (plan.tensor, plan.context) == (pins.get("tensor", 1), pins.get("context", 1))
    return axes and plan.zero == _least_zero(pins)


def _least_zero(pins: Mapping[str, Any]) -> int:
    """The level of ZeRO that was asked for, by its number or by what only higher levels have."""
    if pins.get("reshard_after_forward", "always") != "always":
        return int(pins.get("zero", 3))
    least = 2 if pins.get("accumulation") == "shards" else int("shard_size" in pins)
    return int(pins.get("zero", least))


def best_within(found: Sequence[Found], memory: int) -> float:
    """Weighed seconds of the best that fits; infinity where none does."""
    return min((one.weighed for one in found if one.peak <= memory), default=inf)
