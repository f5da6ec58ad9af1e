"""What the user decided: checked, and turned into plain fields. Everything left out is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, BatchNotDivisible, NoLoss, SplitRefused
from graphaccel.planner.plan import Plan, Precision
from graphaccel.schedule.table import SCHEDULE_NAMES

PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute="bfloat16"),
    "fp16": Precision(compute="float16", scaled=True),
}
RECOMPUTE = ("none", "some", "all")
OUTPUTS = ("loss", "all")
_COUNTS = ("data", "pipeline", "interleave", "microbatches", "bucket_bytes")
NAMES = (*_COUNTS, "recompute", "precision", "schedule", "cuts", "outputs")


@dataclass(frozen=True)
class Pins:
    """Decisions of the user; None where there is none. recompute: one of `RECOMPUTE` or block
    names.
    """

    data: int | None = None
    pipeline: int | None = None
    interleave: int | None = None
    microbatches: int | None = None
    recompute: str | tuple[str, ...] | None = None
    precision: str | None = None
    schedule: str | None = None
    cuts: tuple[str, ...] | None = None
    bucket_bytes: int | None = None
    outputs: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is pinned."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)


@dataclass(frozen=True)
class Limits:
    """What the graph does not allow, with the reason; None where it does."""

    microbatches: str | None = None
    data: str | None = None


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def read_pins(
    pins: Mapping[str, object], step: StepGraph, devices: int, batch: int, limits: Limits
) -> Pins:
    """Check the pins, alone and against each other.

    A pin whose value is None counts as left out.

    Raises: BadPin (GA202), NoLoss (GA103), BatchNotDivisible (GA206), SplitRefused (GA207).
    """
    given = {name: value for name, value in pins.items() if value is not None}
    for name in given:
        if name not in NAMES:
            raise BadPin(pin=name, value=given[name], reason=f"known pins: {', '.join(NAMES)}")
    for name in _COUNTS:
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadPin(pin=name, value=value, reason="it is a count of at least 1")
    for name, known in (
        ("precision", tuple(PRECISIONS)),
        ("schedule", SCHEDULE_NAMES),
        ("outputs", OUTPUTS),
    ):
        if name in given and given[name] not in known:
            raise BadPin(pin=name, value=given[name], reason="unknown", allowed=known)
    typed: dict[str, Any] = {**given, **_names(given, step)}
    found = Pins(**typed)
    found = _check_mesh(found, devices)
    _check_schedule(found)
    _check_loss(found, step)
    _check_batch(found, batch, limits)
    return found


def _names(given: Mapping[str, object], step: StepGraph) -> dict[str, object]:
    """recompute and cuts, checked."""
    found: dict[str, object] = {}
    value = given.get("recompute")
    blocks = tuple(block.name for block in step.blocks)
    if isinstance(value, str) and value not in RECOMPUTE:
        raise BadPin(pin="recompute", value=value, reason="unknown", allowed=RECOMPUTE)
    if value is not None and not isinstance(value, str):
        chosen = _strings("recompute", value)
        for name in chosen:
            if name not in blocks:
                raise BadPin(
                    pin="recompute",
                    value=chosen,
                    reason=f"{name} is no block; blocks: {', '.join(blocks) or 'none'}",
                    allowed=RECOMPUTE,
                )
        found["recompute"] = tuple(name for name in blocks if name in chosen)
    if "cuts" in given:
        order = {n.name: i for i, n in enumerate(step.forward.graph.graph.nodes)}
        cuts = _strings("cuts", given["cuts"])
        for name in cuts:
            if name not in order:
                raise BadPin(pin="cuts", value=cuts, reason=f"no node is called {name}")
        places = [order[name] for name in cuts]
        if places != sorted(set(places)):
            raise BadPin(pin="cuts", value=cuts, reason="they are not in the order of the graph")
        found["cuts"] = cuts
    return found


def _strings(pin: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    raise BadPin(pin=pin, value=value, reason="it is a list of names")


def _check_mesh(pins: Pins, devices: int) -> Pins:
    """data x pipeline = devices; what follows from the other is filled in by the search."""
    for name in ("data", "pipeline"):
        value = getattr(pins, name)
        if value is not None and devices % value:
            allowed = tuple(str(n) for n in divisors(devices))
            reason = f"{devices} devices can not be shared evenly by {value}"
            raise BadPin(pin=name, value=value, reason=reason, allowed=allowed)
    if pins.data and pins.pipeline and pins.data * pins.pipeline != devices:
        raise BadPin(
            pin="data",
            value=pins.data,
            reason=f"data {pins.data} x pipeline {pins.pipeline} is "
            f"{pins.data * pins.pipeline}, not {devices} devices",
            allowed=(str(devices // pins.pipeline),),
        )
    if pins.cuts is not None:
        stages = len(pins.cuts) + 1
        ranks = pins.pipeline or (devices // pins.data if pins.data else None)
        if pins.interleave and ranks and ranks * pins.interleave != stages:
            reason = f"{stages - 1} cuts make {stages} stages, not {ranks * pins.interleave}"
            raise BadPin(pin="cuts", value=pins.cuts, reason=reason)
        if ranks and stages % ranks:
            reason = f"{stages - 1} cuts make {stages} stages, for {ranks} pipeline ranks"
            raise BadPin(pin="cuts", value=pins.cuts, reason=reason)
    return pins


def _check_schedule(pins: Pins) -> None:
    several = pins.interleave is not None and pins.interleave > 1
    if several and pins.schedule not in (None, "interleaved"):
        raise BadPin(
            pin="schedule",
            value=pins.schedule,
            reason=f"interleave={pins.interleave} needs a schedule for several stages a rank",
            allowed=("interleaved",),
        )
    if several and pins.pipeline == 1:
        raise BadPin(
            pin="interleave",
            value=pins.interleave,
            reason="without a pipeline there is nothing to interleave",
            allowed=("1",),
        )


def _check_loss(pins: Pins, step: StepGraph) -> None:
    if step.has_loss:
        return
    for name in ("pipeline", "interleave", "microbatches"):
        if (getattr(pins, name) or 1) > 1:
            raise NoLoss(asked=f"{name}={getattr(pins, name)}")
    if pins.cuts:
        raise NoLoss(asked=f"cuts={pins.cuts}")


def _check_batch(pins: Pins, batch: int, limits: Limits) -> None:
    for axis, limit in (("data", limits.data), ("microbatches", limits.microbatches)):
        if limit is not None and (getattr(pins, axis) or 1) > 1:
            name = "microbatch" if axis == "microbatches" else axis
            raise SplitRefused(axis=name, op="the loss", module="", reason=limit)
    data, microbatches = pins.data or 1, pins.microbatches or 1
    if batch % (data * microbatches):
        allowed = divisors(batch // data) if batch % data == 0 else ()
        raise BatchNotDivisible(batch=batch, microbatches=microbatches, data=data, allowed=allowed)


def base_plan(pins: Pins, devices: int, batch: int, graph: str, cluster: str) -> Plan:
    """The plan on which the search builds: what was pinned and does not depend on the mesh."""
    return Plan(
        devices=devices,
        precision=PRECISIONS[pins.precision or "fp32"],
        bucket_bytes=pins.bucket_bytes or Plan.bucket_bytes,
        outputs=pins.outputs or "loss",
        batch=batch,
        pinned=pins.names,
        graph=graph,
        cluster=cluster,
    )
