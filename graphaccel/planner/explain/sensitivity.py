"""How the plan depends on the cluster: prices of its resources, and regret by the calibration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphaccel.errors import GraphAccelError
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.cluster import MOST_DEVICES, Cluster, Collective, Link, OpTime
from graphaccel.planner.explain.answers import Price, Shift
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.search.offload_search import solve_as_needed
from graphaccel.planner.search.reasons import as_corrected, seconds, wider_cluster
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.solve import Problem

_GIB = 2**30
_OFF = 0.1  # how far each rate of the calibration is moved


def prices(record: Record, problem: Problem, plan: Plan) -> Iterator[Price]:
    """The best plan if one resource of the cluster, or the batch, were different."""
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
    best = record.first(outcome.fitting)
    if best is None:
        return Price(change, None, "", None)
    each = seconds(best) * record.batch / batch
    return Price(change, seconds(best), plan_name(best), 1 - each / seconds(plan))


def shifts(record: Record, problem: Problem, plan: Plan) -> Iterator[Shift]:
    """The regret of the plan with each rate 10 % lower and higher."""
    for factor in (1 - _OFF, 1 + _OFF):
        for name, _, changed in _rates(problem.cluster, factor):
            other = replace(problem, cluster=changed)
            mine = seconds(other.predicted(plan, simulated=True))
            best = record.first(solve_as_needed(other, record.pins, record.batch).fitting)
            if best is None:
                continue
            regret = max(0.0, mine / seconds(best) - 1)
            yield Shift(name, factor, regret, plan_name(plan) if regret == 0 else plan_name(best))


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
