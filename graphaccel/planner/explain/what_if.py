"""What-if queries: re-solves the problem with another decision, machine or calibration.

Everything here solves the same problem again with one thing changed, by the same search and the
same model of time and memory, so that its numbers can be compared with the plan's:

* `why_not`: the best plan under further pins, and what it loses against the chosen one.
* `explain`: for each decision the best plan with each other value (all that is not pinned is
  planned anew around it); shadow prices, the finite differences of the step's time by the cluster's
  resources; stability, the chosen plan's regret when each rate of the calibration is 10 % off.

Memory is that of the search: the estimate, corrected by its error where a program was built. Plans
that did not fit once built are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from graphaccel.errors import BadPin, GraphAccelError, InfeasiblePlan
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.explain.answers import Answer, Choice, Decision, Explanation
from graphaccel.planner.explain.sensitivity import prices, shifts
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.axis_orders import orders
from graphaccel.planner.plan.base_plan import PRECISIONS, makes_kernels
from graphaccel.planner.plan.conflicts import agreeing_pins
from graphaccel.planner.plan.offload import offload_text, read_offload
from graphaccel.planner.plan.pins import NAMES, Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.search.candidates import Shape, shapes, shard_sizes
from graphaccel.planner.search.capabilities import offered
from graphaccel.planner.search.offload_search import WORTH_COPIES, solve_as_needed
from graphaccel.planner.search.reasons import (
    fullest,
    lost_because,
    no_slower,
    seconds,
)
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.solve import Problem, excess
from graphaccel.schedule.table import SCHEDULE_NAMES

_NEAR = 4  # values of a decision that are tried on either side of the chosen one
_OF_THE_GRAPH = ("fusions", "outputs")  # pins that graphs are built for, before planning
_SOLVED = frozenset(
    {"order", "recompute", "cuts", "loss_chunk", "offload", "cast_once"}
)  # chosen when a candidate is solved

Replan = Callable[[Mapping[str, object]], Plan]


def why_not(
    record: Record, plan: Plan, asked: Mapping[str, object], replan: Replan | None = None
) -> Answer:
    """The best plan with `asked` pinned in addition to the existing pins, built to count its
    memory.

    asked: a value of None drops a pin. replan: plans anew, graphs included, with all the pins that
    it is given; without it, pins that change the graphs are refused.
    Raises ValueError for a record without a problem.
    """
    problem = _problem(record)
    said = ", ".join(f"{name}={_value_text(value)}" for name, value in asked.items())
    given = {**record.given, **asked}
    other_graph = [name for name in _OF_THE_GRAPH if name in asked]
    kernels = makes_kernels(given.get("compile"), problem.cluster.device.type)
    if "compile" in asked and kernels != makes_kernels(plan.compile, problem.cluster.device.type):
        other_graph.append("compile")  # the profile has the seconds of its kernels, or of none
    if other_graph and replan is None:
        names = " and ".join(other_graph)
        return Answer(said, "can not be", f"graphs are made for {names}: plan anew with it pinned")
    try:
        if other_graph and replan is not None:
            return _against(record, plan, asked, replan(given), _cluster(record))
        pins = _pins(record, problem, given)
        outcome = solve_as_needed(problem, pins, record.batch)
        best = record.first(outcome.fitting)
        if best is not None and _same(best, plan):
            best = plan  # whose memory is exact
        elif best is not None and record.refine is not None:
            best = record.refine(best)
    except InfeasiblePlan as error:
        return Answer(said, "does not fit", error.message().sentence)
    except GraphAccelError as error:
        return Answer(said, "can not be", _refusal(error))
    result = best or outcome.closest
    assert result is not None
    return _against(record, plan, asked, result, _cluster(record) if best else problem.cluster)


def _against(
    record: Record, plan: Plan, asked: Mapping[str, object], result: Plan, cluster: Cluster
) -> Answer:
    """`result`, the best plan under `asked`, compared with the chosen one. cluster: what it has to
    fit."""
    assert result.prediction is not None
    assert plan.prediction is not None
    gain = 1 - seconds(result) / seconds(plan)
    verdict = "faster" if gain >= 0.005 else "as fast" if gain >= 0 else "slower"
    reason = lost_because(result, plan, cluster)
    if excess(result, cluster) > 0:
        verdict = "does not fit"
    elif _same(result, plan):
        verdict, reason = "chosen", "it is the plan that was chosen"
    elif gain >= 0:
        reason = no_slower(gain, seconds(plan), _against_it(record, plan, asked, gain))
    top = fullest(result)
    return Answer(
        ", ".join(f"{name}={_value_text(value)}" for name, value in asked.items()),
        verdict,
        reason,
        plan_name(result),
        result.prediction.seconds,
        result.prediction.terms,
        plan.prediction.terms,
        top.peak,
        top.rank,
        top.parts,
    )


def _against_it(record: Record, plan: Plan, asked: Mapping[str, object], gain: float) -> str:
    """Why the search would not choose what was asked by itself; "" where it could."""
    given = {name: value for name, value in record.given.items() if value is not None}
    other = [name for name, value in asked.items() if given.get(name, value) != value]
    if other:
        return f"{' and '.join(other)} pinned otherwise"
    names = [name for name, value in asked.items() if value is not None]
    if "precision" in names and _precision(plan) != asked["precision"]:
        return "changes numerics: only when pinned"
    if gain < 0.005:
        return ""
    if asked.get("offload") not in (None, "none") and gain < 1 - 1 / WORTH_COPIES:
        return f"copies to the host must make a step {WORTH_COPIES - 1:.0%} shorter"
    tried = _SOLVED | set(Shape._fields)
    unasked = [name for name in names if name not in tried]
    return f"{' and '.join(unasked)} only when pinned" if unasked else ""


def _value_text(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _refusal(error: GraphAccelError) -> str:
    """An error in one sentence, with the allowed values."""
    message = error.message()
    said = f"{message.sentence}: {message.why}" if message.why else message.sentence
    if isinstance(error, BadPin) and error.allowed:
        said += f"; it can be {', '.join(error.allowed)}"
    return said


def explain(record: Record, plan: Plan) -> Explanation:
    """Explain each decision and each price. Raises ValueError for a record without a problem."""
    problem = _problem(record)
    return Explanation(
        decisions=tuple(_decisions(record, problem, plan)),
        prices=tuple(prices(record, problem, plan)),
        shifts=tuple(shifts(record, problem, plan)),
    )


def value_of(plan: Plan, name: str, blocks: tuple[str, ...]) -> str:
    """A decision of `plan` in the notation of the pin of that name."""
    if name == "recompute":
        if not plan.recomputed:
            return "none"
        if not plan.recompute and set(plan.recomputed) == set(blocks):
            return "selective"
        return "all" if set(plan.recompute) == set(blocks) else "some"
    if name == "offload":
        return offload_text(plan.offload)
    if name == "precision":
        return _precision(plan)
    if name == "shard_size":
        return str(plan.shards)
    return _value_text(plan.order) if name == "order" else str(getattr(plan, name))


def _precision(plan: Plan) -> str:
    return next(n for n, p in PRECISIONS.items() if p == plan.precision)


def _decisions(record: Record, problem: Problem, plan: Plan) -> Iterator[Decision]:
    blocks = problem.profile.block_names
    for name in NAMES:
        values = _values(record, problem, plan, name)
        pinned = name in record.pins.names
        if name == "placements" or not hasattr(plan, name) or not (values or pinned):
            continue
        chosen = value_of(plan, name, blocks)
        others = [v for v in values if _value_text(v) != chosen]
        if others and all(isinstance(v, int) and not isinstance(v, bool) for v in others):
            number = int(chosen)
            below = sorted((v for v in others if v < number), reverse=True)[:_NEAR]
            others = [*below, *sorted(v for v in others if v > number)[:_NEAR]]
        if not others and not pinned:
            continue
        tried = [_choice(record, problem, plan, name, value) for value in others]
        tried.sort(key=lambda c: (c.seconds is None, c.seconds or 0.0))
        yield Decision(name, chosen, pinned, tuple(tried))


def _values(record: Record, problem: Problem, plan: Plan, name: str) -> list:
    """The values of a decision that can be planned with everything else free or as pinned."""
    if name in ("reshard_after_forward", "accumulation") and plan.zero < (
        3 if name == "reshard_after_forward" else 2
    ):
        return []  # nothing to decide
    if name == "shard_size":
        return (
            sorted(shard_sizes(problem.cluster, plan.data, plan.model_parallel_size))
            if plan.zero
            else []
        )
    if name == "order":
        results = orders(problem.cluster, replace(plan, order=AXES, pinned=()))
        return list(results) if len(results) > 1 else []
    if name == "schedule":
        return list(SCHEDULE_NAMES) if plan.pipeline > 1 else []
    if name in Shape._fields:
        free = replace(record.pins, **{name: None})
        results = {getattr(s, name) for s in shapes(problem, _loose(free, name), record.batch)}
        return sorted(results, key=lambda v: (str(type(v)), v))
    if name == "offload":
        free = replace(record.pins, offload=None)
        results = [offload_text(o) for o in offered(free, problem, record.batch)]
        return results if len(results) > 1 or plan.offload else []
    if name == "loss_chunk":
        sizes = problem.sized(plan).chunks if plan.loss_chunk else ()
        return [2 * sizes[0], *sizes] if sizes else []
    if name == "precision":
        rates = problem.cluster.device.peak_flops
        known = [(n, p) for n, p in PRECISIONS.items() if p.compute in rates]
        return [n for n, p in known if not p.matmul or p.matmul in rates]
    return []


def _loose(pins: Pins, name: str) -> Pins:
    """The pins without the cuts, which name nodes of the graph: they hold for one value only."""
    return replace(pins, cuts=None) if name != "cuts" else pins


def _choice(record: Record, problem: Problem, plan: Plan, name: str, value: object) -> Choice:
    """The best plan with `value`; what else follows from the chosen mesh is planned anew."""
    said = _value_text(value)
    pin = read_offload(value) if name == "offload" else value
    wanted = _loose(replace(record.pins, **{name: pin}), name)
    try:
        outcome = solve_as_needed(problem, wanted, record.batch)
    except GraphAccelError as error:
        return Choice(said, "", None, None, error.message().sentence)
    best = record.first(outcome.fitting)
    result = best or outcome.closest
    if result is None:
        return Choice(said, "", None, None, "no plan")
    peak = fullest(result).peak
    reason = lost_because(result, plan, problem.cluster)
    if best is None:
        return Choice(said, plan_name(result), None, peak, reason)
    gain = 1 - seconds(best) / seconds(plan)
    if gain >= 0:
        pinned = name in record.pins.names
        numerics = "changes numerics: only when pinned" if name == "precision" else ""
        reason = no_slower(gain, seconds(plan), "pinned otherwise" if pinned else numerics)
    return Choice(said, plan_name(best), seconds(best), peak, reason)


def _problem(record: Record) -> Problem:
    if record.problem is None:
        raise ValueError("this record is of no search")
    return record.corrected or record.problem


def _cluster(record: Record) -> Cluster:
    """The cluster without memory correction, for plans whose programs were built."""
    assert record.problem is not None
    built = record.refine is not None
    return record.problem.cluster if built else _problem(record).cluster


def _pins(record: Record, problem: Problem, given: Mapping[str, object]) -> Pins:
    step, count = problem.profile.step, problem.cluster.count
    return agreeing_pins(given, step, count, record.batch, problem.limits)


def _same(plan: Plan, other: Plan) -> bool:
    blank = {"notes": (), "pinned": ()}
    return plan.decided(**blank) == other.decided(**blank)
