"""The state of a search over a problem's candidates: their lower bounds, and those solved.

`planner.search.branch_and_bound` decides which are solved, and in which order.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from graphaccel.errors import BadPin, TooManyStages
from graphaccel.planner.cluster.cluster import Cluster, cluster_name
from graphaccel.planner.estimate.estimate import predict_seconds
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.pins import RESHARDS, Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.search.bounds import Bounds, most_stages
from graphaccel.planner.search.candidate_columns import Columns, columns
from graphaccel.planner.search.candidates import (
    Layout,
    Shape,
    layouts,
    meshes_of,
    plain,
    recomputes,
    weighed,
)
from graphaccel.planner.search.memory_floor import seconds_with_memory
from graphaccel.planner.search.reasons import mesh_key, seconds
from graphaccel.planner.search.solve import Outcome, Problem, Shared, excess, in_orders

KEPT = 32
_ACTIONS = 150_000  # forwards of schedules that are simulated at the end: a second
_PLAYED = 20_000  # forwards of a schedule that is simulated to prune candidates


class ShapeBounds(NamedTuple):
    """For each of some shapes: the lower bound in seconds, and whether it is too big in any
    case."""

    seconds: np.ndarray
    big: np.ndarray


class _Candidates(NamedTuple):
    """Meshes of the pinned layout and of the other layouts, and those of each as columns."""

    own: list[Shape]
    others: dict[Layout, list[Shape]]
    columns: dict[Layout, Columns]


def _staying(every: _Candidates) -> _Candidates:
    """The candidates whose schedule supports offloaded activations."""

    def staying(meshes: list[Shape]) -> list[Shape]:
        return [mesh for mesh in meshes if mesh.schedule != "zero_bubble"]

    others = {layout: staying(meshes) for layout, meshes in every.others.items()}
    left = {x: of.of(~of.apart) for x, of in every.columns.items() if not of.apart.all()}
    return _Candidates(staying(every.own), others, left)


class Pass:
    """The candidates of a problem, their bounds, and what was solved.

    own, others: meshes of the pinned layout and of the other layouts; meshes: of each layout.
    columns: their columns. choices: recompute choices. goal: seconds; limit: weighed seconds
    of the best plan so far, simulated, or the goal. times: weighed seconds of plans that fit. late:
    candidates that are too big before anything is computed. settled: meshes of which something
    fits.
    """

    def __init__(
        self, problem: Problem, pins: Pins, batch: int, prune: bool, build: bool, goal: float,
        shared: Shared,
    ) -> None:  # fmt: skip
        self.problem, self.pins, self.batch, self.prune = problem, pins, batch, prune
        self.outcome = Outcome(shared=shared)
        step = problem.profile.step
        self.base = base_plan(
            pins,
            problem.cluster.count,
            batch,
            step.fingerprint,
            cluster_name(problem.cluster),
            (pins.outputs or "loss") if step.has_loss else "all",
            problem.cluster.device.type,
        )
        self.bounds = Bounds(problem, self.base, shared.bounds)
        self._shape_bounds: dict[tuple[Layout, Layout], ShapeBounds] = {}
        self._places: dict[Layout, dict[Shape, int]] = {}
        self.settled: set[Shape] = set()
        self.times: list[float] = []
        self.goal = self.limit = goal
        self.late: list[tuple[float, Shape]] = []
        self._misfits: dict[tuple[object, ...], list[Shape]] = {}  # however much they recompute
        self._tried: Counter[Shape] = Counter()  # recompute choices tried of each mesh
        offered = layouts(problem, pins, batch)
        self.base_layout = offered[0]
        if not build:
            offered = [x for x in offered if x == offered[0] or self.bounds.built(x)]
        own, others, cols = self._candidates(offered, shared.candidates if build else {})
        if own and not self.bounds.build(offered[0]):
            problem.layouts.of(own[0].on(self.base))  # raises the reason
        self.own, self.others, self.columns = own, others, cols
        self.choices = recomputes(problem, pins)
        self.meshes = {offered[0]: list(dict.fromkeys(own)), **others}
        apart = sum(map(len, self.others.values()))
        self.outcome.tally.candidates = len(self.choices) * (len(own) + apart)

    def _candidates(self, offered: Sequence[Layout], known: dict[bool, _Candidates]) -> _Candidates:
        """The candidates of these layouts. known: those of other searches, by whether activations
        are offloaded, which not every schedule supports."""
        offloads = "activations" in self.pins.on_host
        if offloads not in known and offloads and False in known and self.pins.schedule is None:
            known[offloads] = _staying(known[False])
        if offloads not in known:
            given = self.problem, self.pins, self.batch
            own, *others = (list(meshes_of(*given, layout)) for layout in offered)
            apart = dict(zip(offered[1:], others, strict=True))
            every = {offered[0]: list(dict.fromkeys(own)), **apart}
            cols = {x: columns(meshes, self.batch) for x, meshes in every.items() if meshes}
            known[offloads] = _Candidates(own, apart, cols)
        return known[offloads]

    def shape_bounds(self, layout: Layout) -> ShapeBounds:
        """The bounds of a layout's shapes without their recompute choice; recomputed once the
        graph of the layout is built."""
        key = layout, self.bounds.nearest(layout)
        if key not in self._shape_bounds:
            if not self.meshes[layout]:
                return ShapeBounds(np.empty(0), np.empty(0, dtype=bool))
            of = self.columns[layout]
            self._shape_bounds[key] = ShapeBounds(self.bounds.seconds(of), self.bounds.too_big(of))
        return self._shape_bounds[key]

    def cuttable(self, layout: Layout) -> np.ndarray:
        """Whether each of a layout's shapes can be cut into its stages; known once the graph of the
        layout is built."""
        of, bounds = self.columns[layout], self.bounds
        if not bounds.built(layout):
            return np.ones(len(of.small), dtype=bool)
        sizes, place = of.sizes
        most = np.array([bounds.cached(most_stages, layout, size) for size in sizes])
        return of.pipeline * of.interleave <= most[place]

    def place(self, mesh: Shape) -> int:
        """The index of a mesh among those of its layout."""
        return self.places(mesh.layout)[mesh]

    def places(self, layout: Layout) -> dict[Shape, int]:
        """The meshes of a layout, with their indices."""
        if layout not in self._places:
            self._places[layout] = {own: i for i, own in enumerate(self.meshes[layout])}
        return self._places[layout]

    def bound(self, mesh: Shape) -> float:
        """Seconds that a mesh can not beat, however much is recomputed."""
        return float(self.shape_bounds(mesh.layout).seconds[self.place(mesh)])

    def bounds_with_memory(self, layout: Layout, recompute: str | tuple[str, ...]) -> np.ndarray:
        """Seconds that the meshes of a layout can not beat with one of the recompute choices,
        counting what memory forces them to recompute or to copy; infinity where none that is faster
        than the best so far fits."""
        plain_bounds = self.shape_bounds(layout).seconds
        if self.limit == math.inf or not self.prune:
            return plain_bounds
        of = self.columns[layout]
        least = seconds_with_memory(self.bounds, of, self.limit, recompute=recompute != "none")
        ruled_out = plain_bounds[
            (weighed(least) > self.limit) & (weighed(plain_bounds) <= self.limit)
        ]
        self.outcome.cramped = min(self.outcome.cramped, float(ruled_out.min(initial=math.inf)))
        return least

    def of_layout(self, layout: Layout) -> float:
        """Seconds that no candidate of a layout that may fit can beat."""
        described = self.shape_bounds(layout)
        return float(min(described.seconds[~described.big], default=math.inf))

    def least(self) -> float:
        """Seconds that no candidate can beat."""
        return float(
            min(self.shape_bounds(x).seconds.min() for x, own in self.meshes.items() if own)
        )

    def known(self, shape: Shape) -> bool:
        """Whether a shape need not be solved, because it is no better than others or can not fit: a
        deeper recompute of what already fits only costs time."""
        return shape.mesh in self.settled or self.is_misfit(shape.mesh)

    def is_misfit(self, mesh: Shape) -> bool:
        """Whether a mesh holds at least as much as another that does not fit."""
        known = self._misfits.get(mesh.comparable, ())
        if misfit := any(mesh.keeps_no_less(one) for one in known):
            self.outcome.cramped = min(self.outcome.cramped, self.bound(mesh))
        return misfit

    def missed(self, mesh: Shape) -> None:
        """Record that a mesh does not fit with one of the recompute choices."""
        self._tried[mesh] += 1
        if self._tried[mesh] == len(self.choices):
            self._misfits.setdefault(mesh.comparable, []).append(mesh)

    def solve(self, bound: float, shape: Shape, *, floor: bool = True) -> None:
        """Solve a candidate, in each order of its axes. floor: defer it (`late`) where it is too
        big in any case."""
        problem, pins, outcome = self.problem, self.pins, self.outcome
        if floor and self.prune and self.shape_bounds(shape.layout).big[self.place(shape.mesh)]:
            self.late.append((bound, shape))
            outcome.cramped = min(outcome.cramped, bound)
            outcome.tally.infeasible += 1
            outcome.tally.solved += 1
            return
        plan = shape.on(self.base)
        try:
            result = in_orders(problem, plan, shape.recompute, pins.cuts)
        except TooManyStages as error:
            if outcome.too_many is None or error.asked < outcome.too_many.asked:
                outcome.too_many = error
            outcome.tally.impossible += 1
            return
        except BadPin as error:  # the pinned stages of modules
            outcome.refused = outcome.refused or error
            outcome.tally.impossible += 1
            return
        outcome.tally.solved += 1
        fitting = [self._solved(one) for one in result]
        if any(fitting):
            self.settled.add(shape.mesh)
        else:
            outcome.tally.infeasible += 1
            self.missed(shape.mesh)

    def _solved(self, plan: Plan) -> bool:
        """Record a solved candidate in one order of its axes; returns whether it fits."""
        problem, outcome = self.problem, self.outcome
        known = outcome.by_mesh.get(mesh_key(plan))
        outcome.seen.append(plan)
        fits = excess(plan, problem.cluster) <= 0
        if not fits:
            outcome.missed(plan, problem.cluster)
            outcome.cramped = min(outcome.cramped, seconds(plan))
        else:
            outcome.fitting.append(plan)
            bisect.insort(self.times, weighed_of(plan, self.pins))
            long = plan.microbatches * plan.stages > _PLAYED  # simulating it takes seconds
            if weighed_of(plan, self.pins) < self.limit and not long:
                simple = plain(self.pins, plan)
                self.limit = min(self.limit, float(weighed(self._played(plan).seconds, simple)))
        if _better(plan, known, problem.cluster, self.pins):
            outcome.by_mesh[mesh_key(plan)] = plan
        return fits

    def _played(self, plan: Plan) -> Prediction:
        """The plan's times by simulating its schedule."""
        outcome, problem = self.outcome, self.problem
        if plan not in outcome.played:
            outcome.played[plan] = predict_seconds(
                problem.layouts.of(plan), plan, problem.cluster, problem.optimizer_bytes
            )
        return outcome.played[plan]

    def simulate_best(self) -> None:
        """Rank the best plans again by simulating their schedules."""
        outcome = self.outcome
        actions = [plan.microbatches * plan.stages for plan in outcome.fitting[:KEPT]]
        kept = sum(total <= _ACTIONS for total in accumulate(actions))
        outcome.kept = kept = min(len(actions), max(kept, 2))
        for place, plan in enumerate(outcome.fitting[:kept]):
            assert plan.prediction is not None
            memory = plan.prediction.memory
            better = replace(plan, prediction=replace(self._played(plan), memory=memory))
            outcome.fitting[place] = better
            if outcome.by_mesh.get(mesh_key(plan)) == plan:
                outcome.by_mesh[mesh_key(plan)] = better
        outcome.fitting[:kept] = sorted(
            outcome.fitting[:kept], key=lambda plan: rank(plan, self.pins)
        )
        for plan in reversed(outcome.fitting[:kept]):
            outcome.by_mesh[mesh_key(plan)] = plan


def weighed_of(plan: Plan, pins: Pins) -> float:
    """Predicted seconds, `weighed`."""
    return float(weighed(seconds(plan), plain(pins, plan)))


def rank(plan: Plan, pins: Pins) -> tuple[object, ...]:
    """Sort key of plans that fit: predicted seconds, weighed, then the simpler plan."""
    return (
        weighed_of(plan, pins),
        plan.microbatches,
        plan.pipeline,
        plan.interleave,
        len(plan.recomputed),
        plan.zero,
        plan.shard_size,
        RESHARDS.index(plan.reshard_after_forward),
        plan.accumulation,
        plan.tensor,
        plan.context,
        plan.expert,
        bool(plan.reordered),
    )


def _better(plan: Plan, known: Plan | None, cluster: Cluster, pins: Pins) -> bool:
    """Whether `plan` represents its mesh rather than `known`: it fits, or is short of fewer bytes;
    then time."""
    if known is None:
        return True
    new, old = max(excess(plan, cluster), 0), max(excess(known, cluster), 0)
    return (new, rank(plan, pins)) < (old, rank(known, pins))
