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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import BatchNotDivisible, SplitRefused, TooManyStages
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.estimate import predict_seconds
from graphaccel.planner.explain import alternatives, infeasible, seconds
from graphaccel.planner.pins import Limits, Pins, base_plan, divisors, read_pins
from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Profile
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
) -> Plan:
    """The fastest plan that fits, with its prediction, alternatives, notes and certificate.

    pins: decisions of the user (`planner.pins.NAMES`). optimizer_bytes: bytes of optimizer state
    for each trained number (8: AdamW). refine: gives a plan back with exact memory, or raises
    SplitRefused or TooManyStages for one that can not run; called on the best plans until one fits.
    microbatch_limit, data_limit: why the batch can not be split on that axis. batch: examples in
    the global batch, where it is not the captured one.

    Raises: InfeasiblePlan (GA201), BadPin (GA202), TooManyStages (GA203), BatchNotDivisible
    (GA206), SplitRefused (GA207), NoLoss (GA103).
    """
    batch = step.batch_size if batch is None else batch
    if BATCH not in step.sizes:
        reason = "the model takes batches of one size only"
        microbatch_limit, data_limit = microbatch_limit or reason, data_limit or reason
    limits = Limits(microbatch_limit, data_limit)
    decided = read_pins(pins, step, cluster.count, batch, limits)
    problem = Problem(Profile(step), cluster, optimizer_bytes, limits)
    outcome = solve_all(problem, decided, batch)
    if not outcome.fitting:
        raise infeasible(problem, decided, outcome, batch, solve_all, problem)
    best, notes, corrected = _proved(problem, decided, outcome, batch, refine)
    if best is None:
        raise infeasible(problem, decided, outcome, batch, solve_all, corrected)
    return replace(
        best,
        alternatives=alternatives(best, outcome.by_mesh, cluster),
        notes=(*_notes(step, cluster, limits), *notes),
        certificate=outcome.tally.certificate(
            f"gap 0 within the cost model over the {min(KEPT, len(outcome.fitting))} best"
        ),
    )


def solve_all(problem: Problem, pins: Pins, batch: int) -> Outcome:
    """Solve every candidate that its bound does not rule out.

    Raises: BatchNotDivisible (GA206), SplitRefused (GA207), TooManyStages (GA203) when no
    candidate is left for that reason.
    """
    outcome = Outcome()
    shapes = sorted(
        _shapes(problem, pins, batch),
        key=lambda s: (s.bound, s.microbatches, s.pipeline, s.interleave, _depth(s), s.data),
    )
    outcome.tally.candidates = len(shapes)
    if not shapes:
        raise _no_shape(problem, pins, batch)
    base = base_plan(
        pins,
        problem.cluster.count,
        batch,
        problem.profile.step.fingerprint,
        cluster_name(problem.cluster),
    )
    best: list[float] = []
    settled: set[tuple[int, int, int, int]] = set()
    for shape in shapes:
        mesh = (shape.data, shape.pipeline, shape.interleave, shape.microbatches)
        known = outcome.by_mesh.get((shape.data, shape.pipeline))
        full = len(best) >= KEPT and shape.bound > best[KEPT - 1]
        # A deeper recompute of what already fits only costs time.
        if mesh in settled or (full and known is not None):
            outcome.tally.pruned += 1
            continue
        plan = _solved(problem, pins, base, shape, outcome)
        if plan is None:
            outcome.tally.impossible += 1
            continue
        missing = excess(plan, problem.cluster)
        outcome.tally.solved += 1
        if missing > 0:
            outcome.missed(plan, problem.cluster)
        else:
            settled.add(mesh)
            outcome.fitting.append(plan)
            bisect.insort(best, seconds(plan))
        key = (plan.data, plan.pipeline)
        if _better(plan, known, problem.cluster):
            outcome.by_mesh[key] = plan
    if not outcome.fitting and outcome.closest is None and outcome.too_many is not None:
        if problem.limits.data and pins.pipeline is None:  # the data axis is what is missing
            raise _no_shape(problem, pins, batch)
        raise outcome.too_many
    outcome.fitting.sort(key=_rank)
    _simulate_best(problem, outcome)
    return outcome


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


def _shapes(problem: Problem, pins: Pins, batch: int) -> Iterator[Shape]:
    """Every candidate with its bound."""
    step, cluster = problem.profile.step, problem.cluster
    for data in divisors(cluster.count):
        pipeline = cluster.count // data
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
        played = predict_seconds(
            problem.profile, plan, problem.cluster, problem.optimizer_bytes, simulated=True
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
    problem: Problem, pins: Pins, outcome: Outcome, batch: int, refine: Refine | None
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
            continue
        missing = excess(exact, problem.cluster)
        if missing <= 0:
            return exact, tuple(notes), corrected
        notes.append(f"{plan.name}: does not fit once built")
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
    count = problem.cluster.count
    if problem.limits.data and pins.pipeline in (None, 1):
        return SplitRefused(axis="data", op="the loss", module="", reason=problem.limits.data)
    data = pins.data or count // (pins.pipeline or 1)
    return BatchNotDivisible(
        batch=batch, microbatches=pins.microbatches or 1, data=data, allowed=()
    )


def _notes(step: StepGraph, cluster: Cluster, limits: Limits) -> tuple[str, ...]:
    notes = []
    if not step.has_loss and cluster.count > 1:
        notes.append("pipeline not considered: no loss in the graph; pass loss_fn=")
    if limits.microbatches:
        notes.append(f"microbatches not considered: {limits.microbatches}")
    if limits.data and cluster.count > 1:
        notes.append(f"data axis not considered: {limits.data}")
    return tuple(notes)


def cluster_name(cluster: Cluster) -> str:
    """`4 x h100-80gb`: what a plan says it was made for."""
    return f"{cluster.count} x {cluster.device.name}"
