"""Choose a plan: enumerate, bound, solve, simulate the best, prove the winner.

Every candidate is a choice of data x pipeline x interleave x microbatches x recompute (precision
only when pinned: it changes numerics). Solving one means choosing its cuts and the blocks to
compute again, and predicting memory and time in closed form. A candidate whose lower bound (its
work spread evenly, no messages) is above the 32nd best found so far is not solved. The 32 best are
ranked again by playing their schedules; then `refine`, which builds the real programs, has the
last word on memory.

Deterministic: ties go to fewer microbatches, less pipeline, less interleaving, less recomputing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import BatchNotDivisible, GraphAccelError, SplitRefused, TooManyStages
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.conflicts import agreeing_pins
from graphaccel.planner.estimate import predict_seconds
from graphaccel.planner.explain import alternatives, infeasible, seconds
from graphaccel.planner.layouts import Layouts
from graphaccel.planner.outside import outside_notes
from graphaccel.planner.pins import Limits, Pins, base_plan, divisors
from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Profile
from graphaccel.planner.record import Record
from graphaccel.planner.solve import Outcome, Problem, excess, scaled, with_cuts_and_blocks

KEPT = 32
_INTERLEAVE = (1, 2, 4)
_REFINED = 12  # programs built before giving up: each costs as much as a capture

Refine = Callable[[Plan], Plan]


@dataclass(frozen=True)
class Shape:
    """One candidate before it is solved. bound: seconds it can not beat."""

    bound: float
    microbatches: int
    pipeline: int
    interleave: int
    recompute: str | tuple[str, ...]
    data: int


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
    layouts: Layouts | None = None,
) -> Plan:
    """The fastest plan that fits, with its prediction, alternatives, notes and certificate.

    pins: decisions of the user (`planner.pins.NAMES`). optimizer_bytes: bytes of optimizer state
    for each trained number (8: AdamW). refine: gives a plan back with exact memory, or raises
    SplitRefused or TooManyStages for one that can not run; called on the best plans until one fits.
    microbatch_limit, data_limit: why the batch can not be split on that axis. batch: examples in
    the global batch, where it is not the captured one. record: is told what is asked and how the
    search goes, so that it knows the best plan so far when Ctrl-C ends it. shardable: whether the
    optimizer can work on shards: ZeRO is then considered where nothing fits without. layouts:
    profiles of the step and of its shards; without it no axis shards the graph itself.

    Raises: InfeasiblePlan (GA201), BadPin (GA202), TooManyStages (GA203), BatchNotDivisible
    (GA206), SplitRefused (GA207), ConflictingPins (GA210), NoLoss (GA103).
    """
    batch = step.batch_size if batch is None else batch
    if BATCH not in step.sizes:
        reason = "the model takes batches of one size only"
        microbatch_limit, data_limit = microbatch_limit or reason, data_limit or reason
    limits = Limits(microbatch_limit, data_limit)
    decided = agreeing_pins(pins, step, cluster.count, batch, limits)
    problem = Problem(layouts or Layouts(Profile(step)), cluster, optimizer_bytes, limits)
    record = Record() if record is None else record
    record.asked(problem, decided, batch, dict(pins), refine)
    given = decided.names
    outcome, corrected = solve_all(problem, decided, batch, record=record), problem
    best: Plan | None = None
    notes: tuple[str, ...] = ()
    for wanted in _sharded_more(decided, cluster, shardable):
        if wanted is not decided:  # nothing fits with less
            try:
                outcome = solve_all(problem, wanted, batch, record=record)
            except GraphAccelError:  # no batch for a data axis
                break
            decided = wanted
            record.pins = wanted
        if outcome.fitting:
            best, notes, corrected = _proved(
                problem, decided, outcome, batch, refine, record.refused
            )
        if best is not None:
            break
    if best is None:
        raise infeasible(problem, decided, outcome, batch, solve_all, corrected)
    record.corrected = corrected
    return replace(
        best,
        pinned=given,
        alternatives=alternatives(best, outcome.by_mesh, cluster),
        notes=(*outside_notes(step, best, cluster), *_notes(step, cluster, limits), *notes),
        certificate=outcome.tally.certificate(
            f"gap 0 within the cost model over the {min(KEPT, len(outcome.fitting))} best"
        ),
    )


def _sharded_more(pins: Pins, cluster: Cluster, shardable: bool) -> Iterator[Pins]:
    """The pins, then the same with more and more sharded over the data axis."""
    yield pins
    whole = cluster.count // (pins.replica * (pins.pipeline or 1))
    if shardable and pins.zero is None and pins.data != 1 and whole > 1:
        for zero in (1, 2, 3):
            yield replace(pins, zero=zero)


def solve_all(
    problem: Problem,
    pins: Pins,
    batch: int,
    *,
    record: Record | None = None,
    prune: bool = True,
) -> Outcome:
    """Solve every candidate that its bound does not rule out, or every one where not `prune`.

    record: holds the outcome from the first candidate on, and is told after each.

    Raises: BatchNotDivisible (GA206), SplitRefused (GA207), TooManyStages (GA203) when no
    candidate is left for that reason.
    """
    outcome = Outcome()
    candidates = sorted(
        shapes(problem, pins, batch),
        key=lambda s: (s.bound, s.microbatches, s.pipeline, s.interleave, _depth(s), s.data),
    )
    outcome.tally.candidates = len(candidates)
    if not candidates:
        raise _no_shape(problem, pins, batch)
    base = base_plan(
        pins,
        problem.cluster.count,
        batch,
        problem.profile.step.fingerprint,
        cluster_name(problem.cluster),
        (pins.outputs or "loss") if problem.profile.step.has_loss else "all",
    )
    if record is not None:
        record.started(outcome, candidates[0].bound)
    for bound in _solve_each(problem, pins, base, candidates, outcome, prune):
        if record is not None:
            record.tick(bound)
    if not outcome.fitting and outcome.closest is None and outcome.too_many is not None:
        if problem.limits.data and pins.pipeline is None:  # the data axis is what is missing
            raise _no_shape(problem, pins, batch)
        if not pins.names and math.gcd(batch, problem.cluster.count) == 1:
            raise _indivisible(problem.cluster.count, batch, outcome.too_many.possible)
        raise outcome.too_many
    outcome.fitting.sort(key=_rank)
    _simulate_best(problem, outcome)
    return outcome


def _solve_each(
    problem: Problem,
    pins: Pins,
    base: Plan,
    candidates: Sequence[Shape],
    outcome: Outcome,
    prune: bool,
) -> Iterator[float]:
    """Solve the shapes one by one into `outcome`; yields the bound of each once it is done."""
    best: list[float] = []
    settled: set[tuple[int, int, int, int]] = set()
    for shape in candidates:
        mesh = (shape.data, shape.pipeline, shape.interleave, shape.microbatches)
        known = outcome.by_mesh.get((shape.data, shape.pipeline))
        full = len(best) >= KEPT and shape.bound > best[KEPT - 1]
        # A deeper recompute of what already fits only costs time.
        if prune and (mesh in settled or (full and known is not None)):
            outcome.tally.pruned += 1
            yield shape.bound
            continue
        plan = _solved(problem, pins, base, shape, outcome)
        if plan is None:
            outcome.tally.impossible += 1
            yield shape.bound
            continue
        missing = excess(plan, problem.cluster)
        outcome.tally.solved += 1
        outcome.seen.append(plan)
        if missing > 0:
            outcome.missed(plan, problem.cluster)
        else:
            settled.add(mesh)
            outcome.fitting.append(plan)
            bisect.insort(best, seconds(plan))
        if _better(plan, known, problem.cluster):
            outcome.by_mesh[plan.data, plan.pipeline] = plan
        yield shape.bound


def _solved(
    problem: Problem, pins: Pins, base: Plan, shape: Shape, outcome: Outcome
) -> Plan | None:
    plan = replace(
        base,
        data=shape.data,
        pipeline=shape.pipeline,
        interleave=shape.interleave,
        microbatches=shape.microbatches,
        schedule=pins.schedule or ("interleaved" if shape.interleave > 1 else "1f1b"),
    )
    try:
        return with_cuts_and_blocks(problem, plan, shape.recompute, pins.cuts)
    except TooManyStages as error:
        if outcome.too_many is None or error.asked < outcome.too_many.asked:
            outcome.too_many = error
        return None


def shapes(problem: Problem, pins: Pins, batch: int) -> Iterator[Shape]:
    """Every candidate with its bound."""
    step, cluster = problem.profile.step, problem.cluster
    outer = cluster.count // pins.replica
    for data in divisors(outer):
        pipeline = outer // data
        if pins.zero and data == 1:
            continue
        if pins.data not in (None, data) or pins.pipeline not in (None, pipeline):
            continue
        if batch % data or (pipeline > 1 and not step.has_loss):
            continue
        if problem.limits.data and data > 1:
            continue
        for interleave in _interleaves(pins, pipeline):
            for microbatches in divisors(batch // data):
                if pins.microbatches not in (None, microbatches):
                    continue
                if microbatches > 1 and (problem.limits.microbatches or not step.has_loss):
                    continue
                bound = problem.lower_bound(pins, batch, pipeline, interleave, microbatches)
                for choice in _recomputes(problem, pins):
                    yield Shape(bound, microbatches, pipeline, interleave, choice, data)


def _interleaves(pins: Pins, pipeline: int) -> tuple[int, ...]:
    if pins.cuts is not None:
        stages = len(pins.cuts) + 1
        fits = stages % pipeline == 0 and pins.interleave in (None, stages // pipeline)
        return (stages // pipeline,) if fits else ()
    if pins.interleave is not None:
        return (pins.interleave,) if pipeline > 1 or pins.interleave == 1 else ()
    if pipeline == 1 or pins.schedule in ("1f1b", "gpipe"):
        return (1,)
    return _INTERLEAVE


def _recomputes(problem: Problem, pins: Pins) -> tuple[str | tuple[str, ...], ...]:
    if pins.recompute is not None:
        return (pins.recompute,)
    return ("none", "some", "all") if problem.profile.block_names else ("none",)


def _depth(shape: Shape) -> int:
    return ("none", "some", "all").index(shape.recompute) if isinstance(shape.recompute, str) else 0


def _rank(plan: Plan) -> tuple[float, int, int, int, int]:
    return (
        seconds(plan),
        plan.microbatches,
        plan.pipeline,
        plan.interleave,
        len(plan.recompute),
    )


def _better(plan: Plan, known: Plan | None, cluster: Cluster) -> bool:
    """Whether `plan` stands for its mesh rather than `known`: it fits, or misses by less; then
    time.
    """
    if known is None:
        return True
    new, old = max(excess(plan, cluster), 0), max(excess(known, cluster), 0)
    return (new, _rank(plan)) < (old, _rank(known))


def _simulate_best(problem: Problem, outcome: Outcome) -> None:
    """Rank the best again by playing their schedules."""
    for plan in outcome.fitting[:KEPT]:
        profile = problem.layouts.of(plan)
        played = predict_seconds(
            profile, plan, problem.cluster, problem.optimizer_bytes, simulated=True
        )
        assert plan.prediction is not None
        better = replace(plan, prediction=replace(played, memory=plan.prediction.memory))
        outcome.fitting[outcome.fitting.index(plan)] = better
        if outcome.by_mesh.get((plan.data, plan.pipeline)) == plan:
            outcome.by_mesh[plan.data, plan.pipeline] = better
    outcome.fitting[:KEPT] = sorted(outcome.fitting[:KEPT], key=_rank)
    for plan in reversed(outcome.fitting[:KEPT]):
        outcome.by_mesh[plan.data, plan.pipeline] = plan


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
    """
    if refine is None:
        return outcome.fitting[0], (), problem
    notes: list[str] = []
    refused: SplitRefused | TooManyStages | None = None
    corrected, queue, tried = problem, list(outcome.fitting), set()
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
            return exact, tuple(notes), corrected
        notes.append(f"{plan.name}: does not fit once built")
        dropped.add(_decisions(plan))
        outcome.missed(exact, problem.cluster)
        corrected = scaled(problem, plan, exact)
        again = solve_all(corrected, pins, batch)
        queue = again.fitting
    if outcome.closest is None and refused is not None:
        raise refused
    return None, tuple(notes), corrected


def _decisions(plan: Plan) -> Plan:
    """The plan without what was predicted about it."""
    return plan.decided()


def _no_shape(problem: Problem, pins: Pins, batch: int) -> Exception:
    """Why there is no candidate at all."""
    count = problem.cluster.count // pins.replica
    if problem.limits.data and pins.pipeline in (None, 1):
        return SplitRefused(axis="data", op="the loss", module="", reason=problem.limits.data)
    data = pins.data or count // (pins.pipeline or 1)
    return BatchNotDivisible(
        batch=batch, microbatches=pins.microbatches or 1, data=data, allowed=()
    )


def _indivisible(count: int, batch: int, stages: int) -> BatchNotDivisible:
    """No data axis and no pipeline of all devices: what would do, near what was asked."""

    def possible(devices: int, size: int) -> bool:
        return any(size % data == 0 and devices // data <= stages for data in divisors(devices))

    near = sorted(range(1, 2 * count + 1), key=lambda n: (abs(n - count), n))
    devices = [n for n in near if possible(n, batch)][:3]
    near = sorted(range(1, 2 * batch + count + 1), key=lambda n: (abs(n - batch), n))
    batches = [n for n in near if possible(count, n)][:3]
    return BatchNotDivisible(
        batch=batch,
        microbatches=1,
        data=count,
        allowed=(),
        devices=tuple(sorted(devices)),
        batches=tuple(sorted(batches)),
    )


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
