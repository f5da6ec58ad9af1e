"""Solve the candidates of a problem that their bounds do not rule out, the promising ones first.

`planner.search` says in which order, and what is proved by it.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from graphaccel.errors import BadPin, TooManyStages
from graphaccel.planner.bounds import Bounds, Columns, columns
from graphaccel.planner.candidates import (
    WORTH,
    Layout,
    Shape,
    layouts,
    meshes_of,
    plain,
    plain_with,
    recomputes,
)
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.estimate import predict_seconds
from graphaccel.planner.explain import mesh_key, seconds
from graphaccel.planner.guess import guess
from graphaccel.planner.impossible import indivisible, no_shape
from graphaccel.planner.pins import Pins, base_plan
from graphaccel.planner.plan import GATHERS, Plan, Prediction
from graphaccel.planner.promising import Promising
from graphaccel.planner.record import Record
from graphaccel.planner.solve import Outcome, Problem, Shared, excess, in_orders
from graphaccel.planner.whole import solve_whole

KEPT = 32
MANY = 20_000
"""Candidates from which on the promising ones are solved first, and not more than enough."""
_SOLVED = 160  # candidates of a large problem that are solved at most
_FEW = 48  # and at least, of deep models
_AGAIN = 16  # likewise, where it is asked whether anything is worth more than a plan that is known
_BLOCKS = 320_000  # over the square of their blocks: solving and layouts both cost by block
_BUILT = 6  # and layouts whose graphs are made for it, those of the tensor axis alone in any case
# Of 460 candidates of Llama-3-405B on 1,024 to 16,384 devices none took less than 0.94 of what was
# guessed on its layout's graph; on that of another layout guesses were too short, by 0 to 37 %.
_PROMISING, _UNMADE = 1.07, 1.05
# Stages of less than a block take a second each to build, and send what lies inside of blocks: of a
# large problem they are tried after others, and not where one of those fits.
_INSIDE = 1.07
_ACTIONS = 150_000  # forwards of schedules that are played at the end: a second
_PLAYED = 20_000  # forwards of a schedule that is played to see which candidates are left out


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
    """Solve every candidate that its bound does not rule out, or every one where not `prune`.

    record: holds the outcome from the first candidate on, and is told after each. build: make the
    graphs of further layouts; otherwise only those that were made already are looked at. goal:
    seconds; what can not be faster is not looked at. shared: of a search that differs in what is on
    the host.

    Raises: BatchNotDivisible (GA206), SplitRefused (GA207), TooManyStages (GA203) when no
    candidate is left for that reason.
    """
    solving = _Solving(problem, pins, batch, prune, build, goal, shared or Shared())
    outcome = solving.outcome
    if not outcome.tally.candidates:
        raise no_shape(problem, pins, batch)
    if record is not None:
        record.started(outcome, solving.least())
    for done, bound in solving.run():
        if record is not None:
            record.tick(bound, done)
    if not outcome.fitting and outcome.closest is None and outcome.refused is not None:
        raise outcome.refused
    if not outcome.fitting and outcome.closest is None and outcome.too_many is not None:
        if problem.limits.data and pins.pipeline is None:  # the data axis is what is missing
            raise no_shape(problem, pins, batch)
        if not pins.names and math.gcd(batch, problem.cluster.count) == 1:
            raise indivisible(problem.cluster.count, batch, outcome.too_many.possible)
        raise outcome.too_many
    outcome.fitting = [plan for plan in outcome.fitting if seconds(plan) <= goal]
    outcome.fitting.sort(key=lambda plan: _rank(plan, pins))
    solving.simulate_best()
    if prune and outcome.tally.candidates <= MANY and outcome.open is None:
        solve_whole(problem, pins, solving.bounds, solving.meshes, outcome, goal)
    return outcome


class _Told(NamedTuple):
    """Of each of some shapes: seconds it can not beat, and whether it is too big in any case."""

    seconds: np.ndarray
    big: np.ndarray


class _Candidates(NamedTuple):
    """Meshes of what was asked for and of the other layouts, and those of each as columns."""

    own: list[Shape]
    others: dict[Layout, list[Shape]]
    columns: dict[Layout, Columns]


def _staying(every: _Candidates) -> _Candidates:
    """Those of them whose schedule can have activations away."""

    def staying(meshes: list[Shape]) -> list[Shape]:
        return [mesh for mesh in meshes if mesh.schedule != "zero_bubble"]

    others = {layout: staying(meshes) for layout, meshes in every.others.items()}
    left = {x: of.of(~of.apart) for x, of in every.columns.items() if not of.apart.all()}
    return _Candidates(staying(every.own), others, left)


class _Solving:
    """One pass over the candidates of a problem."""

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
        )
        self.bounds = Bounds(problem, self.base, shared.bounds)
        self.told: dict[tuple[Layout, Layout], _Told] = {}
        self.places: dict[Layout, dict[Shape, int]] = {}
        self.settled: set[Shape] = set()
        self.times: list[float] = []
        self.goal = self.limit = goal  # the latter weighed, played, of the best plan so far
        self.late: list[tuple[float, Shape]] = []  # too big before anything is computed
        self.misfits: dict[tuple[object, ...], list[Shape]] = {}  # however much they do again
        self.tried: Counter[Shape] = Counter()  # ways of doing again of each
        offered = layouts(problem, pins, batch)
        self.base_layout = offered[0]
        if not build:
            offered = [x for x in offered if x == offered[0] or self.bounds.built(x)]
        own, others, cols = self._candidates(offered, shared.candidates if build else {})
        if own and not self.bounds.build(offered[0]):
            problem.layouts.of(own[0].on(self.base))  # raises why not
        self.own, self.others, self.columns = own, others, cols
        self.choices = recomputes(problem, pins)
        self.meshes = {offered[0]: list(dict.fromkeys(own)), **others}
        apart = sum(map(len, self.others.values()))
        self.outcome.tally.candidates = len(self.choices) * (len(own) + apart)

    def _candidates(self, offered: Sequence[Layout], known: dict[bool, _Candidates]) -> _Candidates:
        """Of these layouts. known: those of other searches, by whether activations are away, which
        not every schedule can do."""
        away = "activations" in self.pins.on_host
        if away not in known and away and False in known and self.pins.schedule is None:
            known[away] = _staying(known[False])
        if away not in known:
            given = self.problem, self.pins, self.batch
            own, *others = (list(meshes_of(*given, layout)) for layout in offered)
            apart = dict(zip(offered[1:], others, strict=True))
            every = {offered[0]: list(dict.fromkeys(own)), **apart}
            cols = {x: columns(meshes, self.batch) for x, meshes in every.items() if meshes}
            known[away] = _Candidates(own, apart, cols)
        return known[away]

    def _told(self, layout: Layout) -> _Told:
        """What is told of a layout's shapes without their recomputation; anew where the graph of
        the layout was made."""
        key = layout, self.bounds.nearest(layout)
        if key not in self.told:
            if not self.meshes[layout]:
                return _Told(np.empty(0), np.empty(0, dtype=bool))
            of = self.columns[layout]
            self.told[key] = _Told(self.bounds.seconds(of), self.bounds.too_big(of))
        return self.told[key]

    def _place(self, mesh: Shape) -> int:
        """Of a mesh among those of its layout."""
        layout = mesh.layout
        if layout not in self.places:
            self.places[layout] = {own: i for i, own in enumerate(self.meshes[layout])}
        return self.places[layout][mesh]

    def _bound(self, mesh: Shape) -> float:
        return float(self._told(mesh.layout).seconds[self._place(mesh)])

    def _sorted(self, meshes: Iterable[Shape]) -> list[tuple[float, Shape]]:
        """With every recomputation, and its bound: that of its microbatches and axes does for all
        of them."""
        found = [(self._bound(mesh), mesh._replace(recompute=choice))
                 for mesh in meshes for choice in self.choices]  # fmt: skip
        return sorted(found, key=lambda pair: (pair[0], pair[1].order))

    def _of_layout(self, layout: Layout) -> float:
        """Seconds that no candidate of a layout can beat that may fit."""
        told = self._told(layout)
        return float(min(told.seconds[~told.big], default=math.inf))

    def least(self) -> float:
        """Seconds that no candidate can beat."""
        return float(min(self._told(x).seconds.min() for x, own in self.meshes.items() if own))

    def run(self) -> Iterator[tuple[int, float]]:
        """Solve them; yields how many are dealt with and what none of the others can beat."""
        least, tally = self.least(), self.outcome.tally
        done = 0
        large = tally.candidates > MANY and self.prune
        first = () if large else self._sorted(s for s in self.own if plain(self.pins, s))
        for bound, shape in first:
            known = self.outcome.by_mesh.get(mesh_key(shape.on(self.base)))
            full = len(self.times) >= KEPT and bound > self.times[KEPT - 1]
            slow = bound > self.goal or (full and known is not None)
            if self.prune and (slow or self._known(shape)):
                tally.pruned += 1
            else:
                self._solve(bound, shape)
            done += 1
            yield done, least
        for many, bound in self._guided(least) if large else self._others():
            done += many
            yield done, bound
        if not self.outcome.fitting and self.goal == math.inf:  # which of them misses least, then
            for bound, shape in self.late[:KEPT]:
                tally.infeasible -= 1
                tally.solved -= 1
                self._solve(bound, shape, floor=False)
        yield tally.candidates, math.inf

    def _guided(self, least: float) -> Iterator[tuple[int, float]]:
        """Candidates of a large problem, the promising ones first (`planner.guess`), until no bound
        is below the best time found, no guess promises more, or enough were solved: then `open`
        says what none of the rest can beat."""
        tally, choices = self.outcome.tally, self.choices
        groups = dict(self.meshes)
        queue = Promising()
        guessed: dict[Layout, float] = {}  # of its best shape
        slower: dict[tuple[bool, bool], float] = {}  # than guessed before it was made, by its axes
        crowded: dict[Layout, np.ndarray] = {}
        taken: dict[Layout, list[int]] = {layout: [] for layout in groups}
        skipped: list[float] = []  # bounds of those that would keep far too much
        blocks = len(self.problem.profile.block_names)
        inside = blocks > 0 and self.pins.pipeline is None  # stages inside of blocks are tried last

        def push(layout: Layout) -> None:
            meshes, made = groups[layout], self.bounds.built(layout)
            before = guessed.get(layout, math.inf)
            guessed[layout] = math.inf
            if not meshes:
                return
            of = self.columns[layout]
            about, crowded[layout] = guess(self.bounds, of, self.bounds.seconds(of, even=True))
            guessed[layout] = float(about.min())
            if made and guessed[layout] < math.inf > before > 0:
                slower[_axes(layout)] = max(1.0, guessed[layout] / before)
            # what is beyond is not looked at
            seen = (about <= _PROMISING * self.limit) & (made | (about < math.inf))
            about = about * np.where(plain_with(self.pins, layout, of.zero), 1.0, WORTH)
            about *= np.where(inside & (blocks < of.pipeline * of.interleave), _INSIDE, 1.0)
            queue.put(layout, meshes, np.where(seen, about, np.nan), of.order)

        alone = [x for x in groups if x == replace(self.base_layout, tensor=x.tensor)]
        best = beyond = math.inf  # guessed of the tensor axis alone; its size after which none is
        for layout in sorted(alone, key=lambda x: x.tensor):
            if not self.bounds.built(layout) and not self.bounds.build(layout):
                tally.impossible += len(choices) * len(groups.pop(layout))
                continue
            push(layout)
            best = min(best, guessed[layout])
            if guessed[layout] > _PROMISING * best:
                beyond = layout.tensor  # larger ones send more, of smaller products
                break
        for layout in groups:
            if layout not in guessed:
                push(layout)
        built, solved = len({x.tensor for x in groups}), 0
        enough = min(
            _SOLVED, max(_FEW if self.goal == math.inf else _AGAIN, _BLOCKS // max(blocks, 1) ** 2)
        )
        while solved < enough:
            row = queue.pop()
            if row is None:
                if self.limit < math.inf or not queue.return_later():
                    break
                beyond = math.inf  # nothing else fits
                continue
            layout, about, mesh = row.layout, row.seconds, row.first
            if about > _PROMISING * self.limit:
                break
            bound = self._bound(mesh)
            if bound * WORTH > self.limit:
                queue.back(row.rest)
                continue
            if not self.bounds.built(layout):
                if built >= _BUILT or about > self.limit:
                    continue
                if layout.tensor > beyond:
                    queue.later(row)
                    continue
                more = slower.get(_axes(layout), _UNMADE)  # as those like it turned out to be
                if more > row.times:
                    queue.back(replace(row, times=more))
                    continue
                built += 1
                if self.bounds.build(layout):
                    push(layout)
                else:
                    tally.impossible += len(choices) * len(groups.pop(layout))
                continue
            taken[layout].append(row.index)
            queue.back(row.rest)
            outside = not inside or blocks >= mesh.pipeline * mesh.interleave
            if self._is_misfit(mesh) or (not outside and self.limit < math.inf):
                skipped.append(bound)
                tally.pruned += len(choices)
                continue
            for choice in choices:
                if mesh in self.settled:
                    tally.pruned += 1
                elif choice == "none" and crowded[layout][row.index] and len(choices) > 1:
                    skipped.append(bound)
                    self.outcome.cramped = min(self.outcome.cramped, bound)
                    tally.pruned += 1
                    self._tried(mesh)
                else:
                    self._solve(bound, mesh._replace(recompute=choice))
                    solved += 1
            yield len(choices), least
        rest, left = self._left(groups, taken)
        tally.pruned += len(choices) * left
        skipped = [b for b in skipped if b * WORTH <= self.limit]
        if len(rest) or skipped:
            many = len(choices) * len(rest) + len(skipped)
            self.outcome.open = many, min(*rest.tolist(), *skipped, math.inf)

    def _left(
        self, groups: Mapping[Layout, Sequence[Shape]], taken: Mapping[Layout, Sequence[int]]
    ) -> tuple[np.ndarray, int]:
        """Bounds of the meshes that were not taken and might be faster; how many were not taken."""
        rest, left = [np.empty(0)], 0
        for layout, meshes in groups.items():
            if meshes:
                free = np.delete(self._told(layout).seconds, taken[layout])
                rest.append(free[free * WORTH <= self.limit])
                left += len(free)
        return np.concatenate(rest), left

    def _others(self) -> Iterator[tuple[int, float]]:
        """Candidates that shard more than was asked for, by ascending bound."""
        tally = self.outcome.tally
        more = [mesh for mesh in self.own if not plain(self.pins, mesh)]
        heap: list[tuple[float, tuple[object, ...], Layout | Shape]] = []
        for bound, shape in self._sorted(more):
            heapq.heappush(heap, (bound, shape.order, shape))
        for layout, own in self.others.items():
            if own:
                heapq.heappush(heap, (self._of_layout(layout), astuple(layout), layout))
        many = {layout: len(self.choices) * len(own) for layout, own in self.others.items()}
        left = len(self.choices) * len(more) + sum(many.values())
        while heap:
            bound, _, item = heapq.heappop(heap)
            if self.prune and bound * WORTH > self.limit:
                break
            if isinstance(item, Shape):
                if self.prune and self._known(item):
                    tally.pruned += 1
                else:
                    self._solve(bound, item)
                left -= 1
                yield 1, bound
            elif not self.bounds.built(item):
                parent = item.parent
                ahead = parent if self.bounds.nearest(item) != parent else item
                if self.bounds.build(ahead) or (ahead != item and self.bounds.build(item)):
                    heapq.heappush(heap, (self._of_layout(item), astuple(item), item))
                else:
                    tally.impossible += many[item]
                    left -= many[item]
                    yield many[item], bound
            else:
                for mesh in self.others[item]:
                    tight = self._bound(mesh)
                    if self.prune and tight * WORTH > self.limit:
                        continue  # its turn would come after the end
                    for choice in self.choices:
                        shape = mesh._replace(recompute=choice)
                        heapq.heappush(heap, (tight, shape.order, shape))
        tally.pruned += left

    def _known(self, shape: Shape) -> bool:
        """Whether it is known without solving it that a shape is no better than others, or fits
        nowhere: a deeper recompute of what already fits only costs time."""
        return shape.mesh in self.settled or self._is_misfit(shape.mesh)

    def _is_misfit(self, mesh: Shape) -> bool:
        """Whether it keeps no less than another that does not fit."""
        known = self.misfits.get(mesh.comparable, ())
        if misfit := any(mesh.keeps_no_less(one) for one in known):
            self.outcome.cramped = min(self.outcome.cramped, self._bound(mesh))
        return misfit

    def _tried(self, mesh: Shape) -> None:
        """Note that a way of doing again does not make it fit."""
        self.tried[mesh] += 1
        if self.tried[mesh] == len(self.choices):
            self.misfits.setdefault(mesh.comparable, []).append(mesh)

    def _solve(self, bound: float, shape: Shape, *, floor: bool = True) -> None:
        problem, pins, outcome = self.problem, self.pins, self.outcome
        if floor and self.prune and self._told(shape.layout).big[self._place(shape.mesh)]:
            self.late.append((bound, shape))
            outcome.cramped = min(outcome.cramped, bound)
            outcome.tally.infeasible += 1
            outcome.tally.solved += 1
            return
        plan = shape.on(self.base)
        try:
            found = in_orders(problem, plan, shape.recompute, pins.cuts)
        except TooManyStages as error:
            if outcome.too_many is None or error.asked < outcome.too_many.asked:
                outcome.too_many = error
            outcome.tally.impossible += 1
            return
        except BadPin as error:  # the stages that modules were given
            outcome.refused = outcome.refused or error
            outcome.tally.impossible += 1
            return
        outcome.tally.solved += 1
        fitting = [self._solved(one) for one in found]
        if any(fitting):
            self.settled.add(shape.mesh)
        else:
            outcome.tally.infeasible += 1
            self._tried(shape.mesh)

    def _solved(self, plan: Plan) -> bool:
        """Note a solved candidate in one order of its axes: whether it fits."""
        problem, pins, outcome = self.problem, self.pins, self.outcome
        known = outcome.by_mesh.get(mesh_key(plan))
        outcome.seen.append(plan)
        fits = excess(plan, problem.cluster) <= 0
        if not fits:
            outcome.missed(plan, problem.cluster)
            outcome.cramped = min(outcome.cramped, seconds(plan))
        else:
            outcome.fitting.append(plan)
            bisect.insort(self.times, weighed(plan, pins))
            long = plan.microbatches * plan.stages > _PLAYED  # playing it takes seconds
            if weighed(plan, pins) < self.limit and not long:
                self.limit = min(self.limit, self._weigh(plan, self._played(plan).seconds))
        if _better(plan, known, problem.cluster, pins):
            outcome.by_mesh[mesh_key(plan)] = plan
        return fits

    def _weigh(self, plan: Plan, seconds: float) -> float:
        return seconds if plain(self.pins, plan) else seconds * WORTH

    def _played(self, plan: Plan) -> Prediction:
        """The plan's times on its schedule."""
        outcome, problem = self.outcome, self.problem
        if plan not in outcome.played:
            outcome.played[plan] = predict_seconds(
                problem.layouts.of(plan), plan, problem.cluster, problem.optimizer_bytes
            )
        return outcome.played[plan]

    def simulate_best(self) -> None:
        """Rank the best again by playing their schedules."""
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
            outcome.fitting[:kept], key=lambda plan: _rank(plan, self.pins)
        )
        for plan in reversed(outcome.fitting[:kept]):
            outcome.by_mesh[mesh_key(plan)] = plan


def weighed(plan: Plan, pins: Pins) -> float:
    """Predicted seconds, a little more for what is sharded without being asked for."""
    return seconds(plan) if plain(pins, plan) else seconds(plan) * WORTH


def _rank(plan: Plan, pins: Pins) -> tuple[object, ...]:
    return (
        weighed(plan, pins),
        plan.microbatches,
        plan.pipeline,
        plan.interleave,
        len(plan.again),
        plan.zero,
        plan.shard,
        GATHERS.index(plan.gather_again),
        plan.accumulation,
        plan.tensor,
        plan.context,
        plan.expert,
        bool(plan.reordered),
    )


def _better(plan: Plan, known: Plan | None, cluster: Cluster, pins: Pins) -> bool:
    """Whether `plan` stands for its mesh rather than `known`: it fits, or misses by less; then
    time.
    """
    if known is None:
        return True
    new, old = max(excess(plan, cluster), 0), max(excess(known, cluster), 0)
    return (new, _rank(plan, pins)) < (old, _rank(known, pins))


def cluster_name(cluster: Cluster) -> str:
    """`4 x h100-80gb`: what a plan says it was made for."""
    return f"{cluster.count} x {cluster.device.name}"


def _axes(layout: Layout) -> tuple[bool, bool]:
    """The axes of a layout besides tensor: what is guessed too well of one is of its likes."""
    return layout.context > 1, layout.expert > 1
