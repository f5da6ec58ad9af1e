"""Branch and bound: solves the candidates that their lower bounds do not rule out.

`planner.search.search` describes the order, and what it proves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import partial
from itertools import chain

from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.search.best_first import BestFirst
from graphaccel.planner.search.candidates import Layout, Shape, plain, weighed
from graphaccel.planner.search.closing import close
from graphaccel.planner.search.exhaustive import solve_whole
from graphaccel.planner.search.impossible import indivisible, no_shape
from graphaccel.planner.search.reasons import mesh_key, seconds
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search_state import KEPT, Pass, rank
from graphaccel.planner.search.solve import Outcome, Problem, Shared

MANY = 20_000
"""The number of candidates above which only the most promising are solved, best first."""
_SPLITS = frozenset(
    ("tensor", "context", "expert", "data", "pipeline", "interleave", "microbatches", "cuts",
     "stage_of", "shard_size")
)  # fmt: skip
"""Pins that leave no choice of how many stages there are."""


def solve_all(
    problem: Problem,
    pins: Pins,
    batch: int,
    *,
    record: Record | None = None,
    prune: bool = True,
    build: bool = True,
    goal: float = math.inf,
    shared: Shared | None = None,
) -> Outcome:
    """Solve every candidate that its lower bound does not rule out, or all of them if not `prune`.

    record: holds the outcome from the first candidate on, and is updated after each. build: build
    the graphs of further layouts; otherwise only layouts whose graphs exist are considered. goal:
    seconds; slower candidates are skipped. shared: caches of a search that differs in what is
    offloaded.

    Raises: BatchNotDivisible (GA206), SplitRefused (GA207), TooManyStages (GA203) when no candidate
    is left for that reason.
    """
    work = Pass(problem, pins, batch, prune, build, goal, shared or Shared())
    outcome = work.outcome
    if not outcome.tally.candidates:
        raise no_shape(problem, pins, batch)
    large = prune and outcome.tally.candidates > MANY
    if record is not None:
        record.started(outcome, 0.0 if large else work.least())
    first = BestFirst(work) if large else None
    for done, bound in _run(work, first):
        if record is not None:
            record.tick(bound, done)
    if not outcome.fitting and outcome.closest is None and outcome.refused is not None:
        raise outcome.refused
    if not outcome.fitting and outcome.closest is None and outcome.too_many is not None:
        if problem.limits.data and pins.pipeline is None:  # the data axis is what is missing
            raise no_shape(problem, pins, batch)
        if not _SPLITS.intersection(pins.names) and batch % problem.cluster.count:
            raise indivisible(problem.cluster.count, batch, outcome.too_many.possible)
        raise outcome.too_many
    _rank(work)
    if first is not None:
        outcome.rest = partial(_close, first)
    if prune and outcome.tally.candidates <= MANY and outcome.open is None:
        solve_whole(problem, pins, work.bounds, work.meshes, outcome, goal)
    return outcome


def _close(first: BestFirst, target: float, gap: float) -> None:
    """Solve what is open below `target` seconds, and rank the plans again."""
    close(first, target, gap)
    _rank(first.work)


def _rank(work: Pass) -> None:
    """Sort the plans that fit and reach the goal, the best ones by simulation."""
    outcome = work.outcome
    outcome.fitting = [plan for plan in outcome.fitting if seconds(plan) <= work.goal]
    outcome.fitting.sort(key=lambda plan: rank(plan, work.pins))
    work.simulate_best()


def _run(work: Pass, first: BestFirst | None) -> Iterator[tuple[int, float]]:
    """Solve the candidates; yields how many are done and the seconds that none of the others can
    beat."""
    done, tally = 0, work.outcome.tally
    for many, bound in first.run() if first else chain(_plain(work), _others(work)):
        done += many
        yield done, bound
    if not work.outcome.fitting and work.goal == math.inf:  # which of them misses least
        for bound, shape in work.late[:KEPT]:
            tally.infeasible -= 1
            tally.solved -= 1
            work.solve(bound, shape, floor=False)
    yield tally.candidates, math.inf


def _plain(work: Pass) -> Iterator[tuple[int, float]]:
    """Candidates that shard nothing beyond the pins, by ascending bound."""
    least = work.least()
    for bound, shape in _sorted(work, [s for s in work.own if plain(work.pins, s)]):
        known = work.outcome.by_mesh.get(mesh_key(shape.on(work.base)))
        full = len(work.times) >= KEPT and bound > work.times[KEPT - 1]
        slow = bound > work.goal or (full and known is not None)
        if work.prune and (slow or work.known(shape)):
            work.outcome.tally.pruned += 1
        else:
            work.solve(bound, shape)
        yield 1, least


def _sorted(work: Pass, meshes: Sequence[Shape]) -> list[tuple[float, Shape]]:
    """The meshes of one layout with every recompute choice, sorted by lower bound."""
    results = []
    for choice in work.choices if meshes else ():
        bounds = work.bounds_with_memory(meshes[0].layout, choice).tolist()
        results += [(bounds[work.place(mesh)], mesh._replace(recompute=choice)) for mesh in meshes]
    return sorted(results, key=lambda pair: (pair[0], pair[1].order))


def _others(work: Pass) -> Iterator[tuple[int, float]]:
    """Candidates that shard more than the pins ask for, by ascending bound."""
    tally = work.outcome.tally
    more = [mesh for mesh in work.own if not plain(work.pins, mesh)]
    heap: list[tuple[float, tuple[object, ...], Layout | Shape]] = []
    for bound, shape in _sorted(work, more):
        heapq.heappush(heap, (bound, shape.order, shape))
    for layout, own in work.others.items():
        if own:
            heapq.heappush(heap, (work.of_layout(layout), astuple(layout), layout))
    many = {layout: len(work.choices) * len(own) for layout, own in work.others.items()}
    left = len(work.choices) * len(more) + sum(many.values())
    while heap:
        bound, _, item = heapq.heappop(heap)
        if work.prune and weighed(bound) > work.limit:
            break
        if isinstance(item, Shape):
            if work.prune and work.known(item):
                tally.pruned += 1
            else:
                work.solve(bound, item)
            left -= 1
            yield 1, bound
        elif not work.bounds.built(item):
            parent = item.parent
            ahead = parent if work.bounds.nearest(item) != parent else item
            if work.bounds.build(ahead) or (ahead != item and work.bounds.build(item)):
                heapq.heappush(heap, (work.of_layout(item), astuple(item), item))
            else:
                tally.impossible += many[item]
                left -= many[item]
                yield many[item], bound
        else:
            for tight, shape in _sorted(work, work.others[item]):
                if work.prune and weighed(tight) > work.limit:
                    break  # the others would be reached after the end of the search
                heapq.heappush(heap, (tight, shape.order, shape))
    tally.pruned += left
