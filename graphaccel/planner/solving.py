"""Solve the candidates of a problem that their bounds do not rule out, the promising ones first.

`planner.search` says in which order, and what is proved by it.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from itertools import accumulate

from graphaccel.errors import BadPin, TooManyStages
from graphaccel.planner.bounds import Bounds, columns
from graphaccel.planner.candidates import (
    WORTH,
    Layout,
    Shape,
    layouts,
    meshes_of,
    plain,
    recomputes,
)
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.estimate import predict_seconds
from graphaccel.planner.explain import mesh_key, seconds
from graphaccel.planner.guess import guess
from graphaccel.planner.impossible import indivisible, no_shape
from graphaccel.planner.pins import Pins, base_plan
from graphaccel.planner.plan import GATHERS, Plan, Prediction
from graphaccel.planner.record import Record
from graphaccel.planner.solve import Outcome, Problem, Shared, excess, in_orders
from graphaccel.planner.whole import solve_whole

KEPT = 32
MANY = 20_000
"""Candidates from which on the promising ones are solved first, and not more than enough."""
_SOLVED = 160  # candidates of a large problem that are solved at most
_FEW = 48  # and at least, of deep models
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
        self.bounds = Bounds(problem, self.base, shared.moved)
        self.told: dict[tuple[Layout, Layout], dict[Shape, tuple[float, bool]]] = {}
        self.settled: set[Shape] = set()
        self.times: list[float] = []
        self.goal = self.limit = goal  # the latter weighed, played, of the best plan so far
        self.late: list[tuple[float, Shape]] = []  # too big before anything is computed
        self.misfits: dict[tuple[object, ...], list[Shape]] = {}  # however much they do again
        self.tried: Counter[Shape] = Counter()  # ways of doing again of each
        offered = layouts(problem, pins, batch)
        self.base_layout = offered[0]
        away = "activations" in pins.on_host  # which not every schedule can do
        if build and away in shared.candidates:
            own, others, cols = shared.candidates[away]
        else:
            if not build:
                offered = [x for x in offered if x == offered[0] or self.bounds.built(x)]
            own = list(meshes_of(problem, pins, batch, offered[0]))
            others = {x: list(meshes_of(problem, pins, batch, x)) for x in offered[1:]}
            every = {offered[0]: list(dict.fromkeys(own)), **others}
            cols = {x: columns(meshes, batch) for x, meshes in every.items() if meshes}
            if build:
                shared.candidates[away] = own, others, cols
        if own and not self.bounds.build(offered[0]):
            problem.layouts.of(own[0].on(self.base))  # raises why not
        self.own, self.others, self.columns = own, others, cols
        self.choices = recomputes(problem, pins)
        self.meshes = {offered[0]: list(dict.fromkeys(own)), **others}
        apart = sum(map(len, self.others.values()))
        self.outcome.tally.candidates = len(self.choices) * (len(own) + apart)

    def _told(self, layout: Layout) -> dict[Shape, tuple[float, bool]]:
        """Of a layout's shapes without their recomputation: seconds they can not beat, and whether
        they are too big in any case; anew where the graph of the layout was made."""
        key = layout, self.bounds.nearest(layout)
        if key not in self.told:
            meshes = self.meshes[layout]
            self.told[key] = {}
            if meshes:
                of = self.columns[layout]
                found = self.bounds.seconds(of).tolist(), self.bounds.too_big(of).tolist()
                self.told[key] = dict(zip(meshes, zip(*found, strict=True), strict=True))
        return self.told[key]

    def _bound(self, mesh: Shape) -> float:
        return self._told(mesh.layout)[mesh][0]

    def _sorted(self, meshes: Iterable[Shape]) -> list[tuple[float, Shape]]:
        """With every recomputation, and its bound: that of its microbatches and axes does for all
        of them."""
        found = [(self._bound(mesh), replace(mesh, recompute=choice))
                 for mesh in meshes for choice in self.choices]  # fmt: skip
        return sorted(found, key=lambda pair: (pair[0], pair[1].order))

    def _of_layout(self, layout: Layout) -> float:
        """Seconds that no candidate of a layout can beat that may fit."""
        told = self._told(layout).values()
        return min((bound for bound, big in told if not big), default=math.inf)

    def least(self) -> float:
        """Seconds that no candidate can beat."""
        return min(bound for x in self.meshes for bound, _ in self._told(x).values())

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
        heap: list[tuple[float, tuple[object, ...], Shape, Layout, float]] = []
        guessed: dict[Layout, float] = {}  # of its best shape
        slower: dict[tuple[bool, bool], float] = {}  # than guessed before it was made, by its axes
        crowded: set[Shape] = set()
        skipped: list[float] = []  # bounds of those that would keep far too much
        blocks = len(self.problem.profile.block_names)

        def inside(mesh: Shape) -> bool:
            return 0 < blocks < mesh.pipeline * mesh.interleave and self.pins.pipeline is None

        def push(layout: Layout) -> None:
            known, meshes = self.bounds.nearest(layout), groups[layout]
            found: tuple[Iterable[float], Iterable[bool]] = (), ()
            if meshes:
                of = self.columns[layout]
                about, over = guess(self.bounds, of, self.bounds.seconds(of, even=True))
                found = about.tolist(), over.tolist()
            made = self.bounds.built(layout)
            before = guessed.get(layout, math.inf)
            guessed[layout] = min(found[0], default=math.inf)
            if made and guessed[layout] < math.inf > before > 0:
                slower[_axes(layout)] = max(1.0, guessed[layout] / before)
            most = _PROMISING * self.limit  # what is beyond is not looked at
            for mesh, about, over in zip(meshes, *found, strict=True):
                (crowded.add if over else crowded.discard)(mesh)
                if about <= most and (made or about < math.inf):
                    worth = 1.0 if plain(self.pins, mesh) else WORTH
                    worth *= _INSIDE if inside(mesh) else 1.0
                    heapq.heappush(heap, (about * worth, mesh.order, mesh, known, 1.0))

        left = {mesh for own in groups.values() for mesh in own}
        alone = [x for x in groups if x == replace(self.base_layout, tensor=x.tensor)]
        best = beyond = math.inf  # guessed of the tensor axis alone; its size after which none is
        for layout in sorted(alone, key=lambda x: x.tensor):
            if not self.bounds.built(layout) and not self.bounds.build(layout):
                tally.impossible += len(choices) * len(groups[layout])
                left -= set(groups.pop(layout))
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
        enough = min(_SOLVED, max(_FEW, _BLOCKS // max(blocks, 1) ** 2))
        larger: list[tuple[float, tuple[object, ...], Shape, Layout, float]] = []  # of tensor axes
        while (heap or (larger and self.limit == math.inf)) and solved < enough:
            if not heap:  # nothing else fits
                heap, larger, beyond = sorted(larger), [], math.inf
            about, order, mesh, known, scaled = heapq.heappop(heap)
            layout = mesh.layout
            if about > _PROMISING * self.limit:
                break
            if mesh not in left or self._bound(mesh) * WORTH > self.limit:
                continue
            if not self.bounds.built(layout):
                if built >= _BUILT or about > self.limit:
                    continue
                if layout.tensor > beyond:
                    larger.append((about, order, mesh, known, scaled))
                    continue
                more = slower.get(_axes(layout), _UNMADE)  # as those like it turned out to be
                if more > scaled:
                    heapq.heappush(heap, (about * more / scaled, order, mesh, known, more))
                    continue
                built += 1
                if self.bounds.build(layout):
                    push(layout)
                else:
                    tally.impossible += len(choices) * len(groups[layout])
                    left -= set(groups[layout])
                continue
            if known != layout:
                continue  # it was guessed again when its graph was made
            left.discard(mesh)
            if self._is_misfit(mesh) or (inside(mesh) and self.limit < math.inf):
                skipped.append(self._bound(mesh))
                tally.pruned += len(choices)
                continue
            for choice in choices:
                if mesh in self.settled:
                    tally.pruned += 1
                elif choice == "none" and mesh in crowded and len(choices) > 1:
                    skipped.append(self._bound(mesh))
                    self.outcome.cramped = min(self.outcome.cramped, self._bound(mesh))
                    tally.pruned += 1
                    self._tried(mesh)
                else:
                    self._solve(self._bound(mesh), replace(mesh, recompute=choice))
                    solved += 1
            yield len(choices), least
        tally.pruned += len(choices) * len(left)
        told = (self._told(x)[mesh][0] for x, own in groups.items() for mesh in own if mesh in left)
        rest = [b for b in told if b * WORTH <= self.limit]
        skipped = [b for b in skipped if b * WORTH <= self.limit]
        if rest or skipped:
            many = len(choices) * len(rest) + len(skipped)
            self.outcome.open = many, min(*rest, *skipped, math.inf)

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
                        shape = replace(mesh, recompute=choice)
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
        if floor and self.prune and self._told(shape.layout)[shape.mesh][1]:
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
