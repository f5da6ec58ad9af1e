"""Chooses a plan: enumerate, bound, solve, simulate the best, prove the winner.

Every candidate is a choice of tensor x context x expert x data x pipeline x interleave x schedule x
ZeRO x microbatches x recompute (precision only when pinned: it changes numerics). Solving one means
choosing its cuts and the blocks to recompute, and predicting memory and time in closed form, in
each candidate order of its axes (`planner.plan.axis_orders`).

First come the candidates that shard nothing beyond the pins. One of these is not solved if its
lower bound (`planner.search.bounds`) is above the 32nd best so far. Then the others follow, by
ascending bound, until no bound is below the best simulated time; the graph of a layout is built
when its bound is reached. What is not pinned must be worth it (`candidates.weighed`). The 32 best
are ranked again by simulating their schedules; then `refine`, which builds the real programs,
decides on memory.

Nothing is offloaded unless that is pinned, or nothing fits without, or what fits takes much longer
(`planner.search.offload_search`). A plan with offload takes longer than the same plan without: it
copies more, and the host's memory and processors are assumed to be no faster than the device's. So
it is tried only where memory ruled out what might be faster. Parameters are offloaded last
(`planner.search.capabilities.offered`).

Deterministic: ties go to fewer microbatches, less pipeline, less interleaving, less recomputing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import SplitRefused, TooManyStages
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.external_loss import outside_notes
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.plan.conflicts import agreeing_pins
from graphaccel.planner.plan.limits import Limit, Limits
from graphaccel.planner.plan.offload import offload_text
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.capabilities import (
    check_chunk,
    check_matmul_rates,
    check_offload,
    offered,
    planned_notes,
)
from graphaccel.planner.search.impossible import uneven_note
from graphaccel.planner.search.offload_search import (
    close_gap,
    faster_on_host,
    goal_of,
    missing,
    solve_as_needed,
)
from graphaccel.planner.search.reasons import (
    alternatives,
    infeasible,
    kind_of,
    seconds,
    time_text,
)
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search_state import rank
from graphaccel.planner.search.solve import Outcome, Problem, excess, scaled
from graphaccel.sharding.solve.head_parallel import context_notes

_REFINED = 12  # programs built before giving up: each costs as much as a capture

Refine = Callable[[Plan], Plan]


@dataclass(frozen=True)
class Conditions:
    """What the batch and the optimizer allow and need.

    limits: the splits of the batch that the graph does not allow. batch: examples in the global
    batch, where it is not the captured one. shardable: whether the optimizer can work on shards:
    ZeRO is then considered. step_memory: memory that the optimizer's step needs besides its state.
    """

    limits: Limits = field(default_factory=Limits)
    batch: int | None = None
    shardable: bool = True
    step_memory: OptimizerMemory = NOTHING


def search(
    step: StepGraph,
    cluster: Cluster,
    *,
    pins: Mapping[str, object],
    optimizer_bytes: int,
    profiles: Layouts | None = None,
    conditions: Conditions | None = None,
    refine: Refine | None = None,
    record: Record | None = None,
) -> Plan:
    """The fastest plan that fits, with its prediction, alternatives, notes and certificate.

    pins: decisions of the user (`planner.plan.pins.NAMES`). optimizer_bytes: bytes of optimizer
    state for each trained number (8: AdamW). profiles: of the step and of its shards; without it no
    axis shards the graph itself. refine: returns a plan with exact memory, or raises SplitRefused
    or TooManyStages for one that can not run; called on the best plans until one fits. record:
    receives the inputs and the progress of the search, so that it has the best plan so far when
    Ctrl-C ends it.

    Raises: InfeasiblePlan (GA201), BadPin (GA202), TooManyStages (GA203), BatchNotDivisible
    (GA206), SplitRefused (GA207), ConflictingPins (GA210), ScheduleRefused (GA213), NoLoss (GA103).
    """
    conditions = conditions or Conditions()
    batch = step.batch_size if conditions.batch is None else conditions.batch
    limits = _limits_of(step, conditions.limits)
    decided = agreeing_pins(pins, step, cluster.count, batch, limits)
    problem = Problem(
        profiles or Layouts(Profile(step)), cluster, optimizer_bytes, limits, conditions.shardable,
        decided.stage_of or (), conditions.step_memory,
    )  # fmt: skip
    record = Record() if record is None else record
    record.asked(problem, decided, batch, dict(pins), refine)
    check_offload(decided, problem)
    check_matmul_rates(decided, problem)
    check_chunk(decided, problem.profile.in_chunks)
    best, outcome, corrected, notes = _chosen(problem, decided, batch, refine, record)
    record.corrected = corrected
    return replace(
        best,
        pinned=decided.names,
        alternatives=alternatives(
            best, outcome.by_mesh, cluster, corrected.cluster, record.refused, outcome.larger
        ),
        notes=(
            *outside_notes(step, best, cluster),
            *planned_notes(best),
            *context_notes(
                problem.layouts.of(best).node_kinds[1],
                problem.profile.node_kinds[1],
                context=best.context,
                tensor=best.tensor,
            ),
            *_notes(step, cluster, limits),
            *filter(None, [uneven_note(best, decided)]),
            *notes,
        ),
        certificate=outcome.tally.certificate(_gap(problem, best, outcome)),
    )


def _limits_of(step: StepGraph, limits: Limits) -> Limits:
    """The limits, and that of a batch whose size the model fixes."""
    if BATCH in step.sizes:
        return limits
    fixed = Limit("", "", "the model takes batches of one size only")
    return Limits(limits.microbatches or fixed, limits.data or fixed)


def _chosen(
    problem: Problem, decided: Pins, batch: int, refine: Refine | None, record: Record
) -> tuple[Plan, Outcome, Problem, tuple[str, ...]]:
    """The best plan that is proved, the outcome, the problem with corrected memory, and notes.

    Raises: InfeasiblePlan (GA201)."""
    tried: list[tuple[Outcome, Problem]] = []
    for spared in offered(decided, problem, batch):
        wanted = replace(decided, spared=spared)
        outcome, corrected = solve_all(problem, wanted, batch, record=record), problem
        if outcome.fitting:
            given = problem, wanted, outcome, batch, refine, record.refused
            about = outcome.fitting[0]
            if not tried and (offloaded := _with_offload(*given, about)) is not None:
                return offloaded
            best, notes, corrected = _proved(*given)
            if best is not None:
                slower = not tried and seconds(best) > seconds(about)  # than predicted
                if slower and (offloaded := _with_offload(*given, best)) is not None:
                    return offloaded
                break
        tried.append((outcome, corrected))
    else:
        outcome, corrected = min(tried, key=lambda result: missing(result[0], problem.cluster))
        raise infeasible(problem, decided, outcome, batch, solve_as_needed, corrected, refine)
    if tried:
        over = format_bytes(missing(tried[0][0], problem.cluster))
        said = f"{offload_text(best.offload)} on the host: without, no plan fits by {over}"
        notes = said, *notes
    return best, outcome, corrected, notes


def _with_offload(
    problem: Problem,
    pins: Pins,
    outcome: Outcome,
    batch: int,
    refine: Refine | None,
    dropped: set[Plan],
    best: Plan,
) -> tuple[Plan, Outcome, Problem, tuple[str, ...]] | None:
    """A plan with offload that is worth its copies, instead of `best`, the fastest without
    offload."""
    chosen = None
    for wanted, other in faster_on_host(problem, pins, batch, outcome, best):
        if chosen is None and other.fitting:
            result, notes, smaller = _proved(problem, wanted, other, batch, refine, dropped)
            # Where the first does not fit once built, all are solved again, without a goal.
            if result is not None and seconds(result) <= goal_of(best):
                said = f"{offload_text(result.offload)} on the host: without, the best takes "
                said += f"{time_text(seconds(best))} ({plan_name(best)})"
                chosen = result, outcome, smaller, (said, *notes)
        outcome.beside(other, problem.cluster)
    return chosen


def _gap(problem: Problem, best: Plan, outcome: Outcome) -> str:
    """How far the plan may be from the optimum: placements without proof leave it open."""
    kept = outcome.kept
    proved = f"gap 0 within the cost model over the {kept} best"
    if outcome.whole:
        proved = "gap 0 within the cost model, with every cut and every set of blocks"
    if outcome.open is not None:
        many, bound = outcome.open
        gap = max(0.0, 1 - bound / seconds(best))
        proved = (
            f"gap at most {gap:.1%} within the cost model: of {many} that were not solved none "
            f"takes less than {time_text(bound)}"
        )
    guessed = {axis: len(calls) for axis, calls in problem.layouts.guessed(best).items()}
    if not guessed:
        return proved
    said = " and ".join(f"{n} calls on the {axis} axis" for axis, n in guessed.items())
    return f"gap not proved: {said} placed without proof; but for these, {proved}"


def _proved(
    problem: Problem,
    pins: Pins,
    outcome: Outcome,
    batch: int,
    refine: Refine | None,
    dropped: set[Plan],
) -> tuple[Plan | None, tuple[str, ...], Problem]:
    """The first of the best plans that fits once built, notes on those that were dropped before it,
    and the problem with corrected memory.

    Where the exact memory is above the estimate, everything is solved again with device memory
    reduced by the same factor: the error of the estimate is usually the same for plans of one kind
    (`kind_of`). Of each other kind the fastest plan is built as well, where the estimate has it
    faster than what is solved again. If no plan is left then, those with the least estimated memory
    are built.
    """
    if refine is None:
        return outcome.fitting[0], (), problem
    notes: list[tuple[str, str]] = []
    refused: SplitRefused | TooManyStages | None = None
    corrected, queue, tried, equally_wrong = problem, list(outcome.fitting), set(), True
    solved_anew: list[Plan] = []
    while queue and len(tried) < _REFINED:
        plan = queue.pop(0)
        if _decisions(plan) in tried:
            continue
        tried.add(_decisions(plan))
        try:
            exact = refine(plan)
        except (SplitRefused, TooManyStages) as error:
            refused = refused or error
            notes.append((plan_name(plan), error.message().sentence))
            dropped.add(_decisions(plan))
            continue
        if excess(exact, problem.cluster) <= 0:
            if outcome.larger and not solved_anew:
                _leave_open(outcome, exact, tried)
            said = (f"{name}: {why}" for name, why in notes if name != plan_name(exact))
            return exact, tuple(said), corrected
        notes.append((plan_name(plan), "does not fit once built"))
        dropped.add(_decisions(plan))
        outcome.missed(exact, problem.cluster)
        outcome.larger.add(kind_of(plan))
        if not equally_wrong:
            continue
        smaller = scaled(problem, plan, exact)
        if not solved_anew or smaller.cluster.device.memory < corrected.cluster.device.memory:
            corrected, solved = smaller, solve_all(smaller, pins, batch)
            close_gap([solved])
            outcome.open, solved_anew = solved.open or outcome.open, solved.fitting
        queue = [*_of_other_kinds(problem, pins, outcome, solved_anew), *solved_anew]
        if not queue:
            equally_wrong, queue = False, sorted(outcome.fitting, key=_peak)
    if outcome.closest is None and refused is not None:
        raise refused
    return None, tuple(f"{name}: {why}" for name, why in notes), corrected


def _of_other_kinds(
    problem: Problem, pins: Pins, outcome: Outcome, solved_anew: list[Plan]
) -> list[Plan]:
    """The fastest plan of each kind of which none turned out larger than estimated, where it is
    faster than the best of `solved_anew`; the fastest first."""
    first: dict[object, Plan] = {}
    for plan in outcome.fitting:
        if kind_of(plan) not in outcome.larger:
            first.setdefault(kind_of(plan), plan)
    best = seconds(solved_anew[0]) if solved_anew else math.inf
    closer = [p for p in first.values() if seconds(p) < best]
    played = [problem.predicted(p, simulated=True) for p in sorted(closer, key=seconds)[:_REFINED]]
    return sorted((p for p in played if seconds(p) < best), key=lambda plan: rank(plan, pins))


def _leave_open(outcome: Outcome, best: Plan, tried: set[Plan]) -> None:
    """Plans that should be faster than the best and were not built may fit: count them in the
    gap."""
    left = [p for p in outcome.fitting if _decisions(p) not in tried and seconds(p) < seconds(best)]
    if left:
        many, bound = outcome.open or (0, math.inf)
        outcome.open = many + len(left), min(bound, *map(seconds, left))


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(m.peak for m in plan.prediction.memory)


def _decisions(plan: Plan) -> Plan:
    """The plan without its predictions."""
    return plan.decided()


def _notes(step: StepGraph, cluster: Cluster, limits: Limits) -> tuple[str, ...]:
    notes = []
    if limits.microbatches and step.has_loss:
        notes.append(f"microbatches not considered: {limits.microbatches}")
    if limits.data and cluster.count > 1:
        notes.append(f"data axis not considered: {limits.data}")
    return tuple(notes)
