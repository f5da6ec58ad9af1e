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
from dataclasses import dataclass, replace

from graphaccel.errors import BadPin, GraphAccelError, InfeasiblePlan
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.cluster import MOST_DEVICES, Cluster, Collective, Link, OpTime
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.axis_orders import orders
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.conflicts import agreeing_pins
from graphaccel.planner.plan.offload import offload_text, read_offload
from graphaccel.planner.plan.pins import NAMES, Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.candidates import Shape, shapes, shard_sizes
from graphaccel.planner.search.capabilities import offered
from graphaccel.planner.search.offload_search import WORTH_COPIES, solve_as_needed
from graphaccel.planner.search.reasons import (
    as_corrected,
    fullest,
    lost_because,
    no_slower,
    seconds,
    wider_cluster,
)
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.solve import Problem, excess
from graphaccel.schedule.table import SCHEDULE_NAMES

_GIB = 2**30
_OFF = 0.1  # how far each rate of the calibration is moved
_NEAR = 4  # values of a decision that are tried on either side of the chosen one
_OF_THE_GRAPH = ("fusions", "outputs")  # pins that graphs are built for, before planning
_SOLVED = frozenset(
    {"order", "recompute", "cuts", "loss_chunk", "offload", "cast_once"}
)  # chosen when a candidate is solved

Replan = Callable[[Mapping[str, object]], Plan]


@dataclass(frozen=True)
class Choice:
    """One value of a decision and the best plan that has it.

    name: of that plan, "" where there is none. seconds, peak: its prediction. reason: why it lost.
    """

    value: str
    name: str
    seconds: float | None
    peak: int | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """One decision: what was chosen, and the other values, best first."""

    name: str
    value: str
    pinned: bool
    others: tuple[Choice, ...]


@dataclass(frozen=True)
class Price:
    """The value of one change of the problem. seconds: of the best plan then, name: that plan, ""
    and None where nothing fits. gain: the share of the time it saves; negative where it costs."""

    change: str
    seconds: float | None
    name: str
    gain: float | None


@dataclass(frozen=True)
class Shift:
    """One rate of the calibration moved. regret: by which share the chosen plan is then slower than
    the best, `best`."""

    rate: str
    factor: float
    regret: float
    best: str


@dataclass(frozen=True)
class Explanation:
    """Why the plan was chosen."""

    decisions: tuple[Decision, ...]
    prices: tuple[Price, ...]
    shifts: tuple[Shift, ...]


@dataclass(frozen=True)
class Answer:
    """Why not: the best plan under the asked pins against the chosen one.

    verdict: "chosen", "slower", "as fast", "faster", "does not fit" or "can not be". terms: seconds
    by cause, theirs: of the chosen plan. breakdown: bytes at the peak on `rank`. reason: in one
    sentence.
    """

    asked: str
    verdict: str
    reason: str
    name: str = ""
    seconds: float | None = None
    terms: Mapping[str, float] | None = None
    theirs: Mapping[str, float] | None = None
    peak: int | None = None
    rank: int = 0
    breakdown: Mapping[str, int] | None = None


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
    said = ", ".join(f"{name}={_said(value)}" for name, value in asked.items())
    given = {**record.given, **asked}
    remade = [name for name in _OF_THE_GRAPH if name in asked]
    if remade and replan is None:
        names = " and ".join(remade)
        return Answer(said, "can not be", f"graphs are made for {names}: plan anew with it pinned")
    try:
        if remade and replan is not None:
            return _against(record, plan, asked, replan(given), _cluster(record))
        pins = _pins(record, problem, given)
        outcome = solve_as_needed(problem, pins, record.batch)
        best = _first(outcome.fitting, record)
        if best is not None and _same(best, plan):
            best = plan  # whose memory is exact
        elif best is not None and record.refine is not None:
            best = record.refine(best)
    except InfeasiblePlan as error:
        return Answer(said, "does not fit", error.message().sentence)
    except GraphAccelError as error:
        return Answer(said, "can not be", _refusal(error))
    found = best or outcome.closest
    assert found is not None
    return _against(record, plan, asked, found, _cluster(record) if best else problem.cluster)


def _against(
    record: Record, plan: Plan, asked: Mapping[str, object], found: Plan, cluster: Cluster
) -> Answer:
    """`found`, the best plan under `asked`, compared with the chosen one. cluster: what it has to
    fit."""
    assert found.prediction is not None
    assert plan.prediction is not None
    gain = 1 - seconds(found) / seconds(plan)
    verdict = "faster" if gain >= 0.005 else "as fast" if gain >= 0 else "slower"
    reason = lost_because(found, plan, cluster)
    if excess(found, cluster) > 0:
        verdict = "does not fit"
    elif _same(found, plan):
        verdict, reason = "chosen", "it is the plan that was chosen"
    elif gain >= 0:
        reason = no_slower(gain, _against_it(record, plan, asked, gain))
    top = fullest(found)
    return Answer(
        ", ".join(f"{name}={_said(value)}" for name, value in asked.items()),
        verdict,
        reason,
        found.name,
        found.prediction.seconds,
        found.prediction.terms,
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


def _said(value: object) -> str:
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
        prices=tuple(_prices(record, problem, plan)),
        shifts=tuple(_shifts(record, problem, plan)),
    )


def value_of(plan: Plan, name: str, blocks: tuple[str, ...]) -> str:
    """A decision of `plan` in the notation of the pin of that name."""
    if name == "recompute":
        if not plan.again:
            return "none"
        if not plan.recompute and set(plan.again) == set(blocks):
            return "selective"
        return "all" if set(plan.recompute) == set(blocks) else "some"
    if name == "offload":
        return offload_text(plan.offload)
    if name == "precision":
        return _precision(plan)
    if name == "shard_size":
        return str(plan.shards)
    return _said(plan.order) if name == "order" else str(getattr(plan, name))


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
        others = [v for v in values if _said(v) != chosen]
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
        found = orders(problem.cluster, replace(plan, order=AXES, pinned=()))
        return list(found) if len(found) > 1 else []
    if name == "schedule":
        return list(SCHEDULE_NAMES) if plan.pipeline > 1 else []
    if name in Shape._fields:
        free = replace(record.pins, **{name: None})
        found = {getattr(s, name) for s in shapes(problem, _loose(free, name), record.batch)}
        return sorted(found, key=lambda v: (str(type(v)), v))
    if name == "offload":
        free = replace(record.pins, offload=None)
        found = [offload_text(o) for o in offered(free, problem, record.batch)]
        return found if len(found) > 1 or plan.offload else []
    if name == "loss_chunk":
        sizes = problem.sized(plan).chunks if plan.loss_chunk else ()
        return [2 * sizes[0], *sizes] if sizes else []
    if name == "precision":
        rates = problem.cluster.device.peak_flops
        known = [(n, p) for n, p in PRECISIONS.items() if p.compute in rates]
        return [n for n, p in known if not p.products or p.products in rates]
    return []


def _loose(pins: Pins, name: str) -> Pins:
    """The pins without the cuts, which name nodes of the graph: they hold for one value only."""
    return replace(pins, cuts=None) if name != "cuts" else pins


def _choice(record: Record, problem: Problem, plan: Plan, name: str, value: object) -> Choice:
    """The best plan with `value`; what else follows from the chosen mesh is planned anew."""
    said = _said(value)
    pin = read_offload(value) if name == "offload" else value
    wanted = _loose(replace(record.pins, **{name: pin}), name)
    try:
        outcome = solve_as_needed(problem, wanted, record.batch)
    except GraphAccelError as error:
        return Choice(said, "", None, None, error.message().sentence)
    best = _first(outcome.fitting, record)
    found = best or outcome.closest
    if found is None:
        return Choice(said, "", None, None, "no plan")
    peak = fullest(found).peak
    reason = lost_because(found, plan, problem.cluster)
    if best is None:
        return Choice(said, found.name, None, peak, reason)
    gain = 1 - seconds(best) / seconds(plan)
    if gain >= 0:
        pinned = name in record.pins.names
        numerics = "changes numerics: only when pinned" if name == "precision" else ""
        reason = no_slower(gain, "pinned otherwise" if pinned else numerics)
    return Choice(said, best.name, seconds(best), peak, reason)


def _prices(record: Record, problem: Problem, plan: Plan) -> Iterator[Price]:
    cluster = problem.cluster
    step = 8 * _GIB if cluster.device.memory >= 16 * _GIB else cluster.device.memory // 10
    for sign, extra in (("+", step), ("−", -step)):
        changed = _device(cluster, memory=cluster.device.memory + extra)
        yield _price(record, problem, plan, f"{sign}{format_bytes(step)} per device", changed)
    for name, factor, changed in _rates(cluster, 2.0):
        yield _price(record, problem, plan, f"{factor:g}x {name}", changed)
    free = replace(record.pins, **{axis: None for axis in plan.mesh}, cuts=None)
    assert record.problem is not None
    asked = record.problem.cluster
    if 2 * asked.count <= MOST_DEVICES:
        wider, change = wider_cluster(asked, 2)
        wider = as_corrected(wider, asked, cluster)
        yield _price(record, problem, plan, change, wider, free)
    double = 2 * record.batch
    yield _price(record, problem, plan, f"batch {double}, for each example", cluster, batch=double)


def _price(
    record: Record,
    problem: Problem,
    plan: Plan,
    change: str,
    cluster: Cluster,
    pins: Pins | None = None,
    batch: int | None = None,
) -> Price:
    batch = record.batch if batch is None else batch
    try:
        outcome = solve_as_needed(
            replace(problem, cluster=cluster), record.pins if pins is None else pins, batch
        )
    except GraphAccelError:
        return Price(change, None, "", None)
    best = _first(outcome.fitting, record)
    if best is None:
        return Price(change, None, "", None)
    each = seconds(best) * record.batch / batch
    return Price(change, seconds(best), best.name, 1 - each / seconds(plan))


def _shifts(record: Record, problem: Problem, plan: Plan) -> Iterator[Shift]:
    """The regret of the plan with each rate 10 % lower and higher."""
    for factor in (1 - _OFF, 1 + _OFF):
        for name, _, changed in _rates(problem.cluster, factor):
            other = replace(problem, cluster=changed)
            mine = seconds(other.predicted(plan, simulated=True))
            best = _first(solve_as_needed(other, record.pins, record.batch).fitting, record)
            if best is None:
                continue
            regret = max(0.0, mine / seconds(best) - 1)
            yield Shift(name, factor, regret, plan.name if regret == 0 else best.name)


def _rates(cluster: Cluster, factor: float) -> Iterator[tuple[str, float, Cluster]]:
    """(name, factor, cluster) with one rate multiplied by `factor`, one after another."""
    device = cluster.device
    flops = {dtype: rate * factor for dtype, rate in device.peak_flops.items()}
    counted = tuple(_quicker(row, factor) if row.flops else row for row in device.measured)
    moved = tuple(row if row.flops else _quicker(row, factor) for row in device.measured)
    bandwidth = device.memory_bandwidth * factor
    yield "FLOP/s", factor, _device(cluster, peak_flops=flops, measured=counted)
    yield "memory bandwidth", factor, _device(cluster, memory_bandwidth=bandwidth, measured=moved)
    yield (
        "launches per second",
        factor,
        _device(cluster, launch_seconds=device.launch_seconds / factor),
    )
    if cluster.count == 1:
        return
    inner = 1
    for place, link in enumerate(cluster.links):
        if inner >= cluster.count:
            break
        inner = link.size
        for what, changed in (
            ("bandwidth", _faster(link, bandwidth=factor)),
            ("messages per second", _faster(link, messages=factor)),
        ):
            links = (*cluster.links[:place], changed, *cluster.links[place + 1 :])
            yield f"{link.name} {what}", factor, replace(cluster, links=links)


def _faster(link: Link, bandwidth: float = 1.0, messages: float = 1.0) -> Link:
    """The link, and what was measured on it, with higher rates."""

    def rates(of: Link | Collective) -> dict[str, float]:
        hop = of.latency_seconds / messages
        return {"latency_seconds": hop, "bandwidth": of.bandwidth * bandwidth}

    measured = tuple(replace(row, **rates(row)) for row in link.measured)
    return replace(link, measured=measured, **rates(link))


def _quicker(row: OpTime, factor: float) -> OpTime:
    return replace(row, seconds=row.seconds / factor)


def _device(cluster: Cluster, **changes: object) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **changes))  # type: ignore[arg-type]


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


def _first(fitting: list[Plan], record: Record) -> Plan | None:
    """The best plan that was not refused once built."""
    refused = record.refused
    return next((plan for plan in fitting if plan.decided(notes=()) not in refused), None)


def _same(plan: Plan, other: Plan) -> bool:
    blank = {"notes": (), "pinned": ()}
    return plan.decided(**blank) == other.decided(**blank)
