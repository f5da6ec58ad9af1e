"""Choose a plan: enumerate, bound, solve, simulate the best, prove the winner.

Every candidate is a choice of tensor x context x expert x data x pipeline x interleave x schedule x
ZeRO x microbatches x recompute (precision only when pinned: it changes numerics). Solving one means
choosing its cuts and the blocks to compute again, and predicting memory and time in closed form.

First come the candidates that shard nothing that was not asked for. Of these, one is not solved
when its lower bound (`planner.candidates`) is above the 32nd best found so far. Then the others,
by ascending bound, until no bound is below the best time found, played on its schedule; the graph
of a layout is made when its bound comes up. They count as 3 % slower than they are predicted: what
was not asked for must be worth it. The 32 best are ranked again by playing their schedules; then
`refine`, which builds the real programs, has the last word on memory.

Nothing is kept on the host unless that is pinned or nothing fits without. A plan with offload takes
longer than the same plan without: it copies more, and the host's memory and processors are not
taken to be faster than the device's (`planner.offload`). So it can not be the best of those that
fit without. It may be faster than a plan that fits by other means, as by computing more again: who
wants that pins it, and `--explain` shows what it would take.

Deterministic: ties go to fewer microbatches, less pipeline, less interleaving, less recomputing.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from itertools import accumulate

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import BadPin, SplitRefused, TooManyStages
from graphaccel.messages import format_bytes
from graphaccel.planner.candidates import (
    WORTH,
    Bounds,
    Layout,
    Shape,
    layouts,
    meshes_of,
    plain,
    recomputes,
    shapes_of,
)
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.conflicts import agreeing_pins
from graphaccel.planner.estimate import predict_seconds
from graphaccel.planner.explain import alternatives, infeasible, mesh_key, seconds
from graphaccel.planner.guess import guess
from graphaccel.planner.impossible import indivisible, no_shape
from graphaccel.planner.layouts import Layouts
from graphaccel.planner.offering import (
    check_offload,
    check_products,
    offered,
    products_notes,
)
from graphaccel.planner.offload import offload_text
from graphaccel.planner.outside import outside_notes
from graphaccel.planner.pins import Limits, Pins, base_plan
from graphaccel.planner.plan import GATHERS, Plan, Prediction
from graphaccel.planner.profile import Profile
from graphaccel.planner.record import Record
from graphaccel.planner.solve import Outcome, Problem, excess, scaled, with_cuts_and_blocks

KEPT = 32
MANY = 20_000
"""Candidates from which on the promising ones are solved first, and not more than enough."""
_SOLVED = 600  # candidates of a large problem that are solved
_BUILT = 6  # and layouts whose graphs are made for it, those of the tensor axis alone in any case
_ACTIONS = 400_000  # forwards of schedules that are played at the end: a second or two
_PLAYED = 50_000  # forwards of a schedule that is played to see which candidates are left out
_REFINED = 12  # programs built before giving up: each costs as much as a capture

Refine = Callable[[Plan], Plan]


def search(
    step: StepGraph,
    cluster: Cluster,
    *,
    pins: Mapping[str, object],
    optimizer_bytes: int,
    refine: Refine | None = None,
    microbatch_limit: str | None = None,
    data_limit: str | None = None,
    batch: int | None = None,
    record: Record | None = None,
    shardable: bool = True,
    profiles: Layouts | None = None,
) -> Plan:
    """The fastest plan that fits, with its prediction, alternatives, notes and certificate.

    pins: decisions of the user (`planner.pins.NAMES`). optimizer_bytes: bytes of optimizer state
    for each trained number (8: AdamW). refine: gives a plan back with exact memory, or raises
    SplitRefused or TooManyStages for one that can not run; called on the best plans until one fits.
    microbatch_limit, data_limit: why the batch can not be split on that axis. batch: examples in
    the global batch, where it is not the captured one. record: is told what is asked and how the
    search goes, so that it knows the best plan so far when Ctrl-C ends it. shardable: whether the
    optimizer can work on shards: ZeRO is then considered. profiles: of the step and of its shards;
    without it no axis shards the graph itself.

    Raises: InfeasiblePlan (GA201), BadPin (GA202), TooManyStages (GA203), BatchNotDivisible
    (GA206), SplitRefused (GA207), ConflictingPins (GA210), NoLoss (GA103).
    """
    batch = step.batch_size if batch is None else batch
    if BATCH not in step.sizes:
        reason = "the model takes batches of one size only"
        microbatch_limit, data_limit = microbatch_limit or reason, data_limit or reason
    limits = Limits(microbatch_limit, data_limit)
    decided = agreeing_pins(pins, step, cluster.count, batch, limits)
    problem = Problem(
        profiles or Layouts(Profile(step)), cluster, optimizer_bytes, limits, shardable,
        decided.stages or (),
    )  # fmt: skip
    record = Record() if record is None else record
    record.asked(problem, decided, batch, dict(pins), refine)
    check_offload(decided, problem)
    check_products(decided, problem)
    best: Plan | None = None
    notes: tuple[str, ...] = ()
    tried: list[tuple[Outcome, Problem]] = []
    for spared in offered(decided, problem):
        wanted = replace(decided, spared=spared)
        outcome, corrected = solve_all(problem, wanted, batch, record=record), problem
        if outcome.fitting:
            best, notes, corrected = _proved(
                problem, wanted, outcome, batch, refine, record.refused
            )
        if best is not None:
            break
        tried.append((outcome, corrected))
    if best is None:
        outcome, corrected = min(tried, key=lambda found: _missing(found[0], cluster))
        raise infeasible(problem, decided, outcome, batch, solve_as_needed, corrected)
    if tried:
        over = format_bytes(_missing(tried[0][0], cluster))
        notes = (
            f"{offload_text(best.offload)} on the host: without, no plan fits by {over}",
            *notes,
        )
    record.corrected = corrected
    return replace(
        best,
        pinned=decided.names,
        alternatives=alternatives(best, outcome.by_mesh, cluster),
        notes=(
            *outside_notes(step, best, cluster),
            *products_notes(best),
            *_notes(step, cluster, limits),
            *notes,
        ),
        certificate=outcome.tally.certificate(_gap(problem, best, outcome)),
    )


def _gap(problem: Problem, best: Plan, outcome: Outcome) -> str:
    """How far the plan may be from the best: placements that were guessed leave it open."""
    kept = outcome.kept
    proved = f"gap 0 within the cost model over the {kept} best"
    if outcome.open is not None:
        many, bound = outcome.open
        gap = max(0.0, 1 - bound / seconds(best))
        proved = (
            f"gap at most {gap:.1%} within the cost model: of {many} that were not solved none "
            f"takes less than {bound:.3g} s"
        )
    guessed = {axis: len(calls) for axis, calls in problem.layouts.guessed(best).items()}
    if not guessed:
        return proved
    said = " and ".join(f"{n} calls on the {axis} axis" for axis, n in guessed.items())
    return f"gap not proved: {said} placed without proof; but for these, {proved}"


def solve_as_needed(problem: Problem, pins: Pins, batch: int) -> Outcome:
    """`solve_all`; where nothing fits, again with more on the host, as `search` does."""
    found = [solve_all(problem, replace(pins, spared=()), batch)]
    for spared in offered(pins, problem)[1:]:
        if found[-1].fitting:
            break
        found.append(solve_all(problem, replace(pins, spared=spared), batch))
    return (
        found[-1] if found[-1].fitting else min(found, key=lambda o: _missing(o, problem.cluster))
    )


def _missing(outcome: Outcome, cluster: Cluster) -> int:
    """Bytes by which the closest plan does not fit."""
    assert outcome.closest is not None
    return excess(outcome.closest, cluster)


def solve_all(
    problem: Problem,
    pins: Pins,
    batch: int,
    *,
    record: Record | None = None,
    prune: bool = True,
    build: bool = True,
) -> Outcome:
    """Solve every candidate that its bound does not rule out, or every one where not `prune`.

    record: holds the outcome from the first candidate on, and is told after each. build: make the
    graphs of further layouts; otherwise only those that were made already are looked at.

    Raises: BatchNotDivisible (GA206), SplitRefused (GA207), TooManyStages (GA203) when no
    candidate is left for that reason.
    """
    solving = _Solving(problem, pins, batch, prune, build)
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
    outcome.fitting.sort(key=lambda plan: _rank(plan, pins))
    solving.simulate_best()
    return outcome


class _Solving:
    """One pass over the candidates of a problem."""

    def __init__(self, problem: Problem, pins: Pins, batch: int, prune: bool, build: bool) -> None:
        self.problem, self.pins, self.batch, self.prune = problem, pins, batch, prune
        self.outcome = Outcome()
        step = problem.profile.step
        self.base = base_plan(
            pins,
            problem.cluster.count,
            batch,
            step.fingerprint,
            cluster_name(problem.cluster),
            (pins.outputs or "loss") if step.has_loss else "all",
        )
        self.bounds = Bounds(problem, self.base)
        self.bound: dict[tuple[Shape, Layout], float] = {}
        self.settled: set[Shape] = set()
        self.times: list[float] = []
        self.limit = math.inf  # weighed seconds, played, of the best plan so far
        self.late: list[tuple[float, Shape]] = []  # too big before anything is computed
        offered = layouts(problem, pins, batch)
        self.base_layout = offered[0]
        if not build:
            offered = [x for x in offered if x == offered[0] or self.bounds.built(x)]
        own = list(shapes_of(problem, pins, batch, offered[0]))
        if own and not self.bounds.build(offered[0]):
            problem.layouts.of(own[0].on(self.base))  # raises why not
        self.first = self._sorted(s for s in own if plain(pins, s))
        self.more = [s for s in own if not plain(pins, s)]
        self.choices = recomputes(problem, pins)
        self.others = {x: list(meshes_of(problem, pins, batch, x)) for x in offered[1:]}
        apart = len(self.choices) * sum(map(len, self.others.values()))
        self.outcome.tally.candidates = len(own) + apart

    def _bound(self, mesh: Shape) -> float:
        """Of a shape without its recomputation; anew where the graph of its layout was made."""
        key = mesh, self.bounds.nearest(mesh.layout)
        if key not in self.bound:
            self.bound[key] = self.bounds.seconds(mesh)
        return self.bound[key]

    def _sorted(self, shapes: Iterable[Shape]) -> list[tuple[float, Shape]]:
        """With the bound of each; that of its microbatches and axes does for all recomputations."""
        found = [(self._bound(shape.mesh), shape) for shape in shapes]
        return sorted(found, key=lambda pair: (pair[0], pair[1].order))

    def _of_layout(self, layout: Layout) -> float:
        """Seconds that no candidate of a layout can beat that may fit."""
        fitting = (mesh for mesh in self.others[layout] if not self.bounds.too_big(mesh))
        return min(map(self._bound, fitting), default=math.inf)

    def least(self) -> float:
        """Seconds that no candidate can beat."""
        found = [bound for bound, _ in self.first[:1]]
        found += [self._bound(mesh) for mesh in {s.mesh for s in self.more}]
        found += [self._bound(mesh) for own in self.others.values() for mesh in own]
        return min(found)

    def run(self) -> Iterator[tuple[int, float]]:
        """Solve them; yields how many are dealt with and what none of the others can beat."""
        least, tally = self.least(), self.outcome.tally
        done = 0
        large = tally.candidates > MANY and self.prune
        for bound, shape in () if large else self.first:
            known = self.outcome.by_mesh.get(mesh_key(shape.on(self.base)))
            full = len(self.times) >= KEPT and bound > self.times[KEPT - 1]
            # A deeper recompute of what already fits only costs time.
            if self.prune and (shape.mesh in self.settled or (full and known is not None)):
                tally.pruned += 1
            else:
                self._solve(bound, shape)
            done += 1
            yield done, least
        for many, bound in self._guided(least) if large else self._others():
            done += many
            yield done, bound
        if not self.outcome.fitting:  # which of them misses least, then
            for bound, shape in self.late[:KEPT]:
                tally.infeasible -= 1
                self._solve(bound, shape, floor=False)
        yield tally.candidates, math.inf

    def _guided(self, least: float) -> Iterator[tuple[int, float]]:
        """Candidates of a large problem, the promising ones first (`planner.guess`), until no bound
        is below the best time found, or enough were solved: then `open` says what none of the rest
        can beat."""
        tally, choices = self.outcome.tally, self.choices
        own = (*(shape for _, shape in self.first), *self.more)
        groups = {self.base_layout: list(dict.fromkeys(s.mesh for s in own)), **self.others}
        heap: list[tuple[float, tuple[object, ...], Shape, Layout]] = []

        def push(layout: Layout) -> None:
            known = self.bounds.nearest(layout)
            for mesh in groups[layout]:
                about = guess(self.problem, self.bounds, mesh, self.batch, self._bound(mesh))
                if self.bounds.built(layout) or about < math.inf:
                    worth = 1.0 if plain(self.pins, mesh) else WORTH
                    heapq.heappush(heap, (about * worth, mesh.order, mesh, known))

        left = {mesh for own in groups.values() for mesh in own}
        sizes = {x.tensor for x in groups}
        for layout in [x for x in groups if x == replace(self.base_layout, tensor=x.tensor)]:
            if not self.bounds.built(layout) and not self.bounds.build(layout):
                tally.impossible += len(choices) * len(groups[layout])
                left -= set(groups.pop(layout))
        for layout in groups:
            push(layout)
        built, solved = len(sizes), 0
        while heap and solved < _SOLVED:
            _, _, mesh, known = heapq.heappop(heap)
            layout = mesh.layout
            if mesh not in left or self._bound(mesh) * WORTH > self.limit:
                continue
            if not self.bounds.built(layout):
                if built >= _BUILT:
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
            for choice in choices:
                if mesh in self.settled:
                    tally.pruned += 1
                else:
                    self._solve(self._bound(mesh), replace(mesh, recompute=choice))
                    solved += 1
            yield len(choices), least
        tally.pruned += len(choices) * len(left)
        rest = [b for b in map(self._bound, left) if b * WORTH <= self.limit]
        if rest:
            self.outcome.open = len(choices) * len(rest), min(rest)

    def _others(self) -> Iterator[tuple[int, float]]:
        """Candidates that shard more than was asked for, by ascending bound."""
        tally = self.outcome.tally
        heap: list[tuple[float, tuple[object, ...], Layout | Shape]] = []
        for bound, shape in self._sorted(self.more):
            heapq.heappush(heap, (bound, shape.order, shape))
        for layout, own in self.others.items():
            if own:
                heapq.heappush(heap, (self._of_layout(layout), astuple(layout), layout))
        many = {layout: len(self.choices) * len(own) for layout, own in self.others.items()}
        left = len(self.more) + sum(many.values())
        while heap:
            bound, _, item = heapq.heappop(heap)
            if self.prune and bound * WORTH > self.limit:
                break
            if isinstance(item, Shape):
                if self.prune and item.mesh in self.settled:
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

    def _solve(self, bound: float, shape: Shape, *, floor: bool = True) -> None:
        problem, pins, outcome = self.problem, self.pins, self.outcome
        if floor and self.prune and self.bounds.too_big(shape):
            self.late.append((bound, shape))
            outcome.tally.infeasible += 1
            outcome.tally.solved += 1
            return
        plan = shape.on(self.base)
        try:
            plan = with_cuts_and_blocks(problem, plan, shape.recompute, pins.cuts)
        except TooManyStages as error:
            if outcome.too_many is None or error.asked < outcome.too_many.asked:
                outcome.too_many = error
            outcome.tally.impossible += 1
            return
        except BadPin as error:  # the stages that modules were given
            outcome.refused = outcome.refused or error
            outcome.tally.impossible += 1
            return
        known = outcome.by_mesh.get(mesh_key(plan))
        outcome.tally.solved += floor
        outcome.seen.append(plan)
        if excess(plan, problem.cluster) > 0:
            outcome.missed(plan, problem.cluster)
        else:
            self.settled.add(shape.mesh)
            outcome.fitting.append(plan)
            bisect.insort(self.times, weighed(plan, pins))
            long = plan.microbatches * plan.stages > _PLAYED  # playing it takes seconds
            if weighed(plan, pins) < self.limit and not long:
                self.limit = min(self.limit, self._weigh(plan, self._played(plan).seconds))
        if _better(plan, known, problem.cluster, pins):
            outcome.by_mesh[mesh_key(plan)] = plan

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
        len(plan.recompute),
        plan.zero,
        GATHERS.index(plan.gather_again),
        plan.accumulation,
        plan.tensor,
        plan.context,
        plan.expert,
    )


def _better(plan: Plan, known: Plan | None, cluster: Cluster, pins: Pins) -> bool:
    """Whether `plan` stands for its mesh rather than `known`: it fits, or misses by less; then
    time.
    """
    if known is None:
        return True
    new, old = max(excess(plan, cluster), 0), max(excess(known, cluster), 0)
    return (new, _rank(plan, pins)) < (old, _rank(known, pins))


def _proved(
    problem: Problem,
    pins: Pins,
    outcome: Outcome,
    batch: int,
    refine: Refine | None,
    dropped: set[Plan],
) -> tuple[Plan | None, tuple[str, ...], Problem]:
    """The first of the best plans that really fits, why those before it were dropped, and the
    problem.

    Where the exact memory is above the estimate, everything is solved again with a device smaller
    by the same factor: the estimate is usually wrong in the same way for all plans of one model.
    Where none is left then, it was wrong for some more than for others, and those that were thought
    to need least are built.
    """
    if refine is None:
        return outcome.fitting[0], (), problem
    notes: list[str] = []
    refused: SplitRefused | TooManyStages | None = None
    corrected, queue, tried, wrong_alike = problem, list(outcome.fitting), set(), True
    while queue and len(tried) < _REFINED:
        plan = queue.pop(0)
        if _decisions(plan) in tried:
            continue
        tried.add(_decisions(plan))
        try:
            exact = refine(plan)
        except (SplitRefused, TooManyStages) as error:
            refused = refused or error
            notes.append(f"{plan.name}: {error.message().sentence}")
            dropped.add(_decisions(plan))
            continue
        missing = excess(exact, problem.cluster)
        if missing <= 0:
            if not wrong_alike:
                _leave_open(outcome, exact, tried)
            return exact, tuple(notes), corrected
        notes.append(f"{plan.name}: does not fit once built")
        dropped.add(_decisions(plan))
        outcome.missed(exact, problem.cluster)
        if wrong_alike:
            corrected = scaled(problem, plan, exact)
            again = solve_all(corrected, pins, batch)
            outcome.open = again.open or outcome.open
            queue = again.fitting
            if not queue:
                wrong_alike, queue = False, sorted(outcome.fitting, key=_peak)
    if outcome.closest is None and refused is not None:
        raise refused
    return None, tuple(notes), corrected


def _leave_open(outcome: Outcome, best: Plan, tried: set[Plan]) -> None:
    """Those that should be faster than the best and were not built may fit: the gap says so."""
    left = [p for p in outcome.fitting if _decisions(p) not in tried and seconds(p) < seconds(best)]
    if left:
        many, bound = outcome.open or (0, math.inf)
        outcome.open = many + len(left), min(bound, *map(seconds, left))


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(m.peak for m in plan.prediction.memory)


def _decisions(plan: Plan) -> Plan:
    """The plan without what was predicted about it."""
    return plan.decided()


def _notes(step: StepGraph, cluster: Cluster, limits: Limits) -> tuple[str, ...]:
    notes = []
    if limits.microbatches and step.has_loss:
        notes.append(f"microbatches not considered: {limits.microbatches}")
    if limits.data and cluster.count > 1:
        notes.append(f"data axis not considered: {limits.data}")
    return tuple(notes)


def cluster_name(cluster: Cluster) -> str:
    """`4 x h100-80gb`: what a plan says it was made for."""
    return f"{cluster.count} x {cluster.device.name}"
