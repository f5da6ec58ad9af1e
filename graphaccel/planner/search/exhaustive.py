"""Exhaustive search for small problems: every cut, set of recomputed blocks and axis order.

It covers the candidates that the lower bounds leave, with every recompute option of each block.
`planner.search.solve` cuts evenly in time and chooses blocks by what each saves alone: near the
optimum, but not always optimal. Where few cuts are left, all are tried: each is first simulated
without recomputation, which none of its sets of blocks can beat except by hiding more of ZeRO 3's
collectives; nor can a set beat one that it contains. GPipe is tried here as well: with unequal
stages it may be faster than 1F1B. So is ZeRO 3 that holds gathered parameters for a microbatch's
backward.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from graphaccel.planner.plan.axis_orders import orders
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.profile.candidate_cuts import candidate_cuts
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import Layout, Shape, plain, weighed
from graphaccel.planner.search.reasons import mesh_key, seconds
from graphaccel.planner.search.recompute import block_options
from graphaccel.planner.search.solve import Outcome, Problem, chunked, excess_of

_CUTS = 1500  # of all candidates and orders of their axes together; with more, nothing is tried
_PLANS = 4000  # that are simulated: some seconds at most
_SETS = 40_000  # of blocks that are looked at
_BETTER = 1 - 1e-9


def solve_whole(
    problem: Problem, pins: Pins, bounds: Bounds, meshes: Mapping[Layout, Sequence[Shape]],
    outcome: Outcome, goal: float = math.inf,
) -> None:  # fmt: skip
    """Insert plans that are better than the best of `outcome`, or than `goal` seconds, at its
    front; its `whole` records whether everything was tried. Nothing is tried where stages or "some"
    blocks are pinned."""
    if problem.stages or pins.recompute in ("some", "selective"):
        return
    best = outcome.fitting[0] if outcome.fitting else None
    limit = goal if best is None else _weighed(pins, best, seconds(best))
    left = _left(problem, pins, bounds, meshes, limit)
    ways = sum(_how_many(problem, pins, mesh.on(bounds.plan(mesh.layout))) for _, _, mesh in left)
    if ways > _CUTS:
        return
    plans: list[Plan] = []
    counts = _Counts()
    for bound, _, mesh in left:
        if bound >= limit:
            break
        for plan in _plans(problem, pins, mesh.on(bounds.plan(mesh.layout))):
            for one in _better(problem, pins, plan, limit, counts):
                limit = _weighed(pins, one, seconds(one))
                plans.append(one)
    outcome.whole = not counts.ended
    for plan in plans:
        outcome.fitting.insert(0, plan)
        outcome.by_mesh[mesh_key(plan)] = plan


class _Counts:
    """What has been simulated, and looked at, so far."""

    def __init__(self) -> None:
        self.tried = self.seen = 0

    @property
    def ended(self) -> bool:
        """Whether something was left out."""
        return self.tried > _PLANS or self.seen > _SETS


def _better(
    problem: Problem, pins: Pins, plan: Plan, limit: float, counts: _Counts
) -> Iterator[Plan]:
    """The plan with each set of recomputed blocks that fits and is faster than `limit` and those
    before."""
    slow: set[frozenset[tuple[str, tuple[str, ...]]]] = set()
    for blocks in _sets(problem, pins, plan, slow):
        counts.seen += 1
        if any(each <= blocks.items() for each in slow):
            continue
        counts.tried += 1
        if counts.ended:
            return
        one = plan.with_recomputed(blocks)
        if limit == math.inf and not problem.fits(one):
            continue  # most do not, where nothing has fitted so far
        prediction = problem.time(one)
        time = _weighed(pins, one, prediction.seconds)
        if time < limit * _BETTER:  # however little memory it takes otherwise
            memory = problem.memory(one)
            if excess_of(memory, problem.cluster) <= 0:
                limit = time
                yield replace(one, prediction=replace(prediction, memory=memory))
        if _weighed(pins, one, _floor(one, prediction)) >= limit * _BETTER:
            slow.add(frozenset(blocks.items()))


def _left(
    problem: Problem, pins: Pins, bounds: Bounds, meshes: Mapping[Layout, Sequence[Shape]],
    limit: float,
) -> list[tuple[float, tuple[object, ...], Shape]]:  # fmt: skip
    """Candidates that may be faster, the least bound first; a graph that the search did not build
    belongs to a layout that can not be."""
    results = []
    for layout, own in meshes.items():
        if not own or not bounds.built(layout):
            continue
        every = [*own, *_kept(pins, own)]
        every += _gpipes(pins, every)
        of = columns(every, bounds.batch)
        rows = zip(every, bounds.seconds(of).tolist(), bounds.too_big(of).tolist(), strict=True)
        for mesh, bound, big in rows:
            least = _weighed(pins, mesh, bound)
            if least < limit and not big:
                results.append((least, mesh.order, mesh))
    return sorted(results, key=lambda row: row[:2])


def _kept(pins: Pins, own: Sequence[Shape]) -> list[Shape]:
    """Shapes in which ZeRO 3 holds gathered parameters from a microbatch's forward to its backward:
    slower than for the full step, but with several stages on a rank it may take less memory."""
    free = [] if pins.reshard_after_forward is not None else own
    return [mesh._replace(reshard_after_forward="never")
            for mesh in free
            if mesh.reshard_after_forward == "once_per_step" and mesh.microbatches > 1]  # fmt: skip


def _gpipes(pins: Pins, own: Sequence[Shape]) -> list[Shape]:
    if pins.schedule is not None or pins.on_host:
        return []
    return [
        mesh._replace(schedule="gpipe")
        for mesh in own
        if mesh.schedule == "1f1b" and mesh.pipeline > 1 and mesh.microbatches > 1
    ]


def _weighed(pins: Pins, of: Shape | Plan, seconds: float) -> float:
    return float(weighed(seconds, plain(pins, of)))


def _positions(problem: Problem, plan: Plan) -> tuple[str, ...]:
    profile = problem.layouts.of(plan)
    places = candidate_cuts(profile, problem.sized(plan)).positions
    return tuple(profile.names[place] for place in places)


def _how_many(problem: Problem, pins: Pins, plan: Plan) -> int:
    if pins.cuts is not None or plan.stages == 1:
        return len(orders(problem.cluster, plan))
    cuts = math.comb(len(_positions(problem, plan)), plan.stages - 1)
    return cuts * len(orders(problem.cluster, plan))


def _plans(problem: Problem, pins: Pins, plan: Plan) -> Iterator[Plan]:
    """All plans of one candidate, without the choice of blocks."""
    free = "scatter_sends" not in plan.pinned and plan.tensor > 1 and plan.pipeline > 1
    several = product(orders(problem.cluster, plan), chunked(problem, plan))
    for order, chunk in several:
        if pins.cuts is not None:
            cuts: Iterator[tuple[str, ...]] = iter([pins.cuts])
        else:
            cuts = combinations(_positions(problem, plan), plan.stages - 1)
        for choice in cuts:
            for parts in (False, True) if free else (plan.scatter_sends,):
                one = replace(chunk, order=order, cuts=choice, scatter_sends=parts)
                yield one
                held = replace(one, cast_once=True)
                casts = plan.microbatches > 1 and "cast_once" not in plan.pinned
                if casts and held.holds_casts and problem.profile.step.has_loss:
                    yield held


def _sets(
    problem: Problem,
    pins: Pins,
    plan: Plan,
    slow: Container[frozenset[tuple[str, tuple[str, ...]]]],
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Sets of recomputed blocks with what is saved of each, the smallest first. slow: sets of which
    no superset is wanted, filled meanwhile."""
    profile = problem.layouts.of(plan)
    names = profile.block_names
    if pins.recompute is not None:
        whole = {"none": (), "all": names}
        chosen = whole[pins.recompute] if isinstance(pins.recompute, str) else pins.recompute
        yield dict.fromkeys(chosen, ())
        return
    yield {}
    if frozenset() in slow:
        return
    options = [own for own in block_options(profile, problem.sized(plan)) if own]
    for size in range(1, len(options) + 1):
        for blocks in combinations(options, size):
            for ways in product(*blocks):
                yield {own.name: own.saved for own in ways}
        if size == 1:
            options = [
                [one for one in own if frozenset({(one.name, one.saved)}) not in slow]
                for own in options
            ]


def _floor(plan: Plan, prediction: Prediction) -> float:
    """Lower bound on the seconds of the plan with any blocks recomputed. A second of recomputation
    in the backward may hide two of ZeRO 3's collectives, and nothing else is hidden twice.
    prediction: of the plan with none recomputed."""
    if plan.zero == 3 and plan.data > 1:
        return prediction.compute + prediction.bubble + prediction.optimizer
    return prediction.seconds
