"""What the user decided: checked, and turned into plain fields. Everything left out is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt, prod
from typing import Any

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, BatchNotDivisible, NoLoss, SplitRefused
from graphaccel.ir.program import Sharded
from graphaccel.planner.module_pins import (
    VOCAB,
    check_stages,
    read_placements,
    read_stages,
    vocabulary_placements,
)
from graphaccel.planner.offload import offload_text, read_offload
from graphaccel.planner.order import AXES
from graphaccel.planner.ordering import read_order
from graphaccel.planner.plan import Plan, Precision
from graphaccel.schedule.table import SCHEDULE_NAMES

PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute="bfloat16"),
    "bf16-params": Precision(compute="bfloat16", stream="bfloat16"),
    "fp16": Precision(compute="float16", scaled=True),
    "tf32": Precision(products="tfloat32"),
    "fp8": Precision(compute="bfloat16", stream="bfloat16", products="float8_e4m3fn"),
}
RECOMPUTE = ("none", "some", "selective", "all")
OUTPUTS = ("loss", "all")
ACCUMULATIONS = ("whole", "shards")
CONTEXT_BY = ("heads", "sequence")
ORT = ("off", "auto", "all")
FALLBACK = ("error", "fx")
COMPILE = ("off", "inductor")
_COUNTS = (
    "data", "pipeline", "tensor", "context", "expert", "interleave", "microbatches", "bucket_bytes",
    "loss_chunk",
)  # fmt: skip
SWITCHES = ("sequence", "scatter_sends", "cast_once", "cuda_graphs")
NAMES = (
    *_COUNTS, "order", "recompute", "precision", "schedule", "cuts", "outputs",
    "zero", "shard", "gather_again", "cast_once", "accumulation", "sequence", "context_by",
    "scatter_sends", "pins", "fusions",
    "vocab", "stages", "ort", "fallback", "compile", "cuda_graphs", "offload",
)  # fmt: skip


@dataclass(frozen=True)
class Pins:
    """Decisions of the user; None where there is none. recompute: one of `RECOMPUTE` or block
    names. pins: how single parameters rest, by name, those of `vocab` among them. stages: path of
    a module and its stage, in the order of the graph. fusions: read by `kernels.registry.enabled`.
    spared: no pin; what is on the host because nothing fits otherwise, where `offload` is not one.
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
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    order: tuple[str, ...] | None = None
    zero: int | None = None
    shard: int | None = None
    gather_again: bool | str | None = None
    cast_once: bool | None = None
    accumulation: str | None = None
    sequence: bool | None = None
    context_by: str | None = None
    scatter_sends: bool | None = None
    pins: tuple[tuple[str, tuple[Sharded, ...]], ...] | None = None
    vocab: str | None = None
    stages: tuple[tuple[str, int], ...] | None = None
    fusions: str | tuple[str, ...] | None = None
    loss_chunk: int | None = None
    ort: str | tuple[str, ...] | None = None
    fallback: str | None = None
    compile: str | None = None
    cuda_graphs: bool | None = None
    offload: tuple[str, ...] | None = None
    spared: tuple[str, ...] = ()

    @property
    def replica(self) -> int:
        """Devices that hold one stage of one replica together."""
        return (self.expert or 1) * (self.context or 1) * (self.tensor or 1)

    @property
    def zeros(self) -> tuple[int, ...]:
        """The levels of ZeRO that have what is pinned, ascending."""
        if self.zero is not None:
            return (self.zero,)
        if self.gather_again not in (None, True):
            return (3,)
        if self.accumulation == "shards":
            return (2, 3)
        asked = self.shard is not None and not self.over_data
        return (1, 2, 3) if asked else (0, 1, 2, 3)

    @property
    def over_data(self) -> bool:
        """Whether single parameters are to rest sharded over data."""
        return any(split.axis == "data" for _, splits in self.pins or () for split in splits)

    @property
    def on_host(self) -> tuple[str, ...]:
        """What the plan keeps there."""
        return self.spared if self.offload is None else self.offload

    @property
    def names(self) -> tuple[str, ...]:
        """What is pinned."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)


@dataclass(frozen=True)
class Limits:
    """What the graph does not allow, with the reason; None where it does."""

    microbatches: str | None = None
    data: str | None = None


def shard(dim: int, axis: str) -> Sharded:
    """A tensor rests with its dim `dim` split evenly over mesh axis `axis`.

    For `pins={"head.weight": graphaccel.shard(0, "tensor")}`; axis is "data", "tensor", "context"
    or "expert". A tuple of several is applied in its order.
    """
    return Sharded(axis, dim)


def replicate() -> tuple[Sharded, ...]:
    """A tensor rests whole on every device of its stage (see `shard`)."""
    return ()


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def read_pins(
    pins: Mapping[str, object], step: StepGraph, devices: int, batch: int, limits: Limits
) -> Pins:
    """Check the pins, alone and against each other.

    A pin whose value is None counts as left out.

    Raises: BadPin (GA202), NoLoss (GA103), BatchNotDivisible (GA206), SplitRefused (GA207).
    """
    given = _values(pins)
    typed: dict[str, Any] = {**given, **_names(given, step)}
    if "pins" in given:
        typed["pins"] = read_placements(given["pins"], step)
    if "stages" in given:
        typed["stages"] = read_stages(given["stages"], step)
    if "offload" in given:
        typed["offload"] = read_offload(given["offload"])
    found = _ordered(Pins(**typed))
    _check_loss(found, step)
    found = _check_mesh(found, devices)
    if found.vocab is not None:
        sizes = _sizes(found, devices)
        sizes["data"] = found.shard or sizes["data"]
        placed = vocabulary_placements(found.vocab, step, sizes)
        own = {**placed, **dict(found.pins or ())}
        found = replace(found, pins=tuple(sorted(own.items())))
    _check_together(found, devices, step.has_loss)
    _check_batch(found, batch, limits)
    return found


def check_alone(pins: Mapping[str, object], devices: int, batch: int) -> None:
    """As `read_pins`, as far as that needs no graph."""
    graph = ("recompute", "ort", "pins", "vocab", "stages", "fusions")
    given: dict[str, Any] = {n: v for n, v in _values(pins).items() if n not in graph}
    if "offload" in given:
        given["offload"] = read_offload(given["offload"])
    if "cuts" in given:
        given["cuts"] = _strings("cuts", given["cuts"])
    found = _check_mesh(_ordered(Pins(**given)), devices)
    _check_together(found, devices, True)
    _check_batch(found, batch, Limits())


def _values(pins: Mapping[str, object]) -> dict[str, object]:
    """Those that are not left out, each checked by itself."""
    given = {name: value for name, value in pins.items() if value is not None}
    for name in given:
        if name not in NAMES:
            raise BadPin(pin=name, value=given[name], reason=f"known pins: {', '.join(NAMES)}")
    for name in (*_COUNTS, "shard"):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadPin(pin=name, value=value, reason="it is a count of at least 1")
    for name, known in (
        ("precision", tuple(PRECISIONS)),
        ("schedule", SCHEDULE_NAMES),
        ("outputs", OUTPUTS),
        ("fallback", FALLBACK),
        ("compile", COMPILE),
        ("accumulation", ACCUMULATIONS),
        ("vocab", VOCAB),
        ("context_by", CONTEXT_BY),
    ):
        if name in given and given[name] not in known:
            raise BadPin(pin=name, value=given[name], reason="unknown", allowed=known)
    for name in SWITCHES:
        if not isinstance(given.get(name, True), bool):
            reason = "it is true or false"
            raise BadPin(pin=name, value=given[name], reason=reason, allowed=("True", "False"))
    return given


def _check_together(pins: Pins, devices: int, has_loss: bool) -> None:
    _check_zero(pins, devices)
    _check_sequence(pins)
    _check_sends(pins)
    _check_parameters_away(pins)
    _check_casts(pins, has_loss)
    _check_schedule(pins)
    if pins.stages:
        check_stages(dict(pins.stages), pins.cuts, pins.pipeline, pins.interleave, pins.schedule)


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
    if "ort" in given:
        found["ort"] = _ort(given["ort"], step)
    if "cuts" in given:
        order = step.positions
        cuts = _strings("cuts", given["cuts"])
        for name in cuts:
            if name not in order:
                raise BadPin(pin="cuts", value=cuts, reason=f"no node is called {name}")
        places = [order[name] for name in cuts]
        if places != sorted(set(places)):
            raise BadPin(pin="cuts", value=cuts, reason="they are not in the order of the graph")
        found["cuts"] = cuts
    return found


def _ort(value: object, step: StepGraph) -> str | tuple[str, ...]:
    """One of `ORT`, or paths of modules that compute something."""
    if isinstance(value, str):
        if value not in ORT:
            raise BadPin(pin="ort", value=value, reason="unknown", allowed=ORT)
        return value
    paths = _strings("ort", value)
    modules = {n.meta.get("module", "") for n in step.graph.graph.nodes}
    for path in paths:
        if not any(m == path or m.startswith(f"{path}.") for m in modules):
            raise BadPin(pin="ort", value=paths, reason=f"no op belongs to {path}", allowed=ORT)
    return paths


def _strings(pin: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    raise BadPin(pin=pin, value=value, reason="it is a list of names")


def _ordered(pins: Pins) -> Pins:
    """With every axis in the order: one that it leaves out has one device, wherever it stands."""
    if pins.order is None:
        return pins
    order = read_order(pins.order, {axis: getattr(pins, axis) for axis in AXES})
    left = {axis: 1 for axis in AXES if axis not in pins.order}
    return replace(pins, order=order, **left)


def _check_zero(pins: Pins, devices: int) -> None:
    zero = pins.zero
    if zero is not None and (isinstance(zero, bool) or zero not in (0, 1, 2, 3)):
        raise BadPin(
            pin="zero", value=zero, reason="it is a level of ZeRO", allowed=("0", "1", "2", "3")
        )
    again = pins.gather_again
    if again is not None and not (isinstance(again, bool) or again == "step"):
        raise BadPin(
            pin="gather_again", value=again, reason="it is a choice",
            allowed=("True", "step", "False"),
        )  # fmt: skip
    sizes = _sizes(pins, devices)
    data = sizes["data"]
    if again not in (None, True) and pins.zeros != (3,):
        reason = f"with zero={zero} no parameter is gathered"
        raise BadPin(pin="gather_again", value=again, reason=reason, allowed=("True",))
    if pins.accumulation == "shards" and min(pins.zeros) < 2:
        reason = f"with zero={zero} every device keeps whole gradients"
        raise BadPin(pin="accumulation", value=pins.accumulation, reason=reason, allowed=("whole",))
    if min(pins.zeros) and data == 1:
        raise _without_zero(pins, "with data=1 there is no axis to shard over")
    _check_shard(pins, data)
    for name, splits in pins.pins or ():
        for split in splits:
            if sizes[split.axis] == 1:
                reason = f"{name} is to be sharded over {split.axis}, which has one device"
                raise BadPin(pin="pins", value={name: split}, reason=reason)


def _check_shard(pins: Pins, data: int) -> None:
    """The part of the data axis that ZeRO shards over. data: the largest that axis can be."""
    if pins.shard is None:
        return
    reason = None
    if pins.shard == 1:
        reason = "over one device nothing is sharded, which is zero=0"
    elif pins.zero == 0 and not pins.over_data:
        reason = "with zero=0 nothing is sharded"
    elif data % pins.shard:
        reason = f"data={data} can not be made of groups of {pins.shard}"
    if reason is not None:
        allowed = () if pins.zero == 0 else tuple(str(n) for n in divisors(data) if n > 1)
        raise BadPin(pin="shard", value=pins.shard, reason=reason, allowed=allowed)


def _without_zero(pins: Pins, reason: str, allowed: Sequence[int] = (0,)) -> BadPin:
    """Of the pin that asks for ZeRO. allowed: its levels that can be."""
    if pins.zero is not None:
        levels = tuple(map(str, allowed))
        return BadPin(pin="zero", value=pins.zero, reason=reason, allowed=levels)
    if pins.gather_again not in (None, True):
        said = pins.gather_again
        return BadPin(pin="gather_again", value=said, reason=reason, allowed=("True",))
    if pins.accumulation == "shards":
        said = pins.accumulation
        return BadPin(pin="accumulation", value=said, reason=reason, allowed=("whole",))
    return BadPin(pin="shard", value=pins.shard, reason=reason)


def _check_sequence(pins: Pins) -> None:
    if pins.sequence and pins.tensor == 1:
        reason = "with tensor=1 there are no regions of tensor parallelism to shard between"
        raise BadPin(pin="sequence", value=True, reason=reason, allowed=("False",))
    if pins.context_by and pins.context == 1:
        reason = "with context=1 no device shares a sequence with another"
        raise BadPin(pin="context_by", value=pins.context_by, reason=reason)


def _check_sends(pins: Pins) -> None:
    for axis in ("tensor", "pipeline"):
        if pins.scatter_sends and getattr(pins, axis) == 1:
            reason = f"with {axis}=1 there is nothing to send in parts"
            raise BadPin(pin="scatter_sends", value=True, reason=reason, allowed=("False",))


def _check_casts(pins: Pins, has_loss: bool) -> None:
    if not pins.cast_once:
        return
    reason = None
    if PRECISIONS[pins.precision or "fp32"].compute == "float32":
        reason = f"with precision={pins.precision or 'fp32'} no parameter is cast"
    elif pins.zero == 3:
        reason = "with zero=3 parameters are gathered; gather_again='step' does it once a step"
    elif pins.zeros == (3,):
        reason = (
            f"gather_again={pins.gather_again!r} is of zero=3, which gathers parameters that rest "
            "in shards; cast_once holds casts of those that rest whole, under zero=0, 1 or 2"
        )
    elif not has_loss:
        reason = "with a loss outside of the graph there is one microbatch"
    if reason is not None:
        raise BadPin(pin="cast_once", value=True, reason=reason, allowed=("False",))


def _check_parameters_away(pins: Pins) -> None:
    """What else would hold whole parameters on the device, where they rest on the host."""
    if "parameters" not in (pins.offload or ()):
        return
    whole = pins.zero == 0 and (pins.data or 1) > 1
    if whole or pins.zero in (1, 2):
        reason = "over data, parameters on the host rest in shards, which is zero=3"
        raise BadPin(pin="zero", value=pins.zero, reason=reason, allowed=("3",))
    if pins.gather_again not in (None, True):
        raise BadPin(
            pin="gather_again",
            value=pins.gather_again,
            reason="parameters on the host are copied up again for the backward: no device holds "
            "them between",
            allowed=("True",),
        )
    if pins.cast_once:
        reason = "parameters on the host are cast when they were copied up, in each microbatch"
        raise BadPin(pin="cast_once", value=True, reason=reason, allowed=("False",))


def _sizes(pins: Pins, devices: int) -> dict[str, int]:
    """The mesh axes' sizes; of data the largest there can be."""
    data = pins.data or devices // (pins.replica * (pins.pipeline or 1))
    inner = {axis: getattr(pins, axis) or 1 for axis in ("expert", "context", "tensor")}
    return {"data": data, **inner}


def _check_mesh(pins: Pins, devices: int) -> Pins:
    """The axes' product = devices; what follows from the others is filled in by the search."""
    for name in AXES:
        value = getattr(pins, name)
        if value is not None and devices % value:
            allowed = tuple(str(n) for n in divisors(devices))
            reason = f"{devices} devices can not be shared evenly by {value}"
            raise BadPin(pin=name, value=value, reason=reason, allowed=allowed)
    said = {axis: getattr(pins, axis) or 1 for axis in ("data", "expert", "context", "tensor")}
    said = {axis: size for axis, size in said.items() if size > 1 or axis == "data"}
    said["pipeline"] = pins.pipeline or 1
    product = prod(said.values())
    whole = pins.data and pins.pipeline
    if (whole and product != devices) or devices % product:
        rest = product // said["data"]
        name = "data" if pins.data else next(a for a in reversed(AXES) if said.get(a, 1) > 1)
        text = " x ".join(f"{a} {n}" for a, n in said.items() if getattr(pins, a) is not None)
        raise BadPin(
            pin=name,
            value=said[name],
            reason=f"{text} is {product}, not {devices} devices",
            allowed=(str(devices // rest),) if name == "data" and devices % rest == 0 else (),
        )
    if pins.cuts is not None:
        stages = len(pins.cuts) + 1
        ranks = pins.pipeline or (devices // (pins.data * pins.replica) if pins.data else None)
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
    if pins.schedule == "zero_bubble":
        _check_weights_apart(pins)
    if several and pins.pipeline == 1:
        raise BadPin(
            pin="interleave",
            value=pins.interleave,
            reason="without a pipeline there is nothing to interleave",
            allowed=("1",),
        )


def _check_weights_apart(pins: Pins) -> None:
    if min(pins.zeros) > 1:
        raise _without_zero(
            pins,
            "schedule='zero_bubble' adds gradients up after the backward, and ZeRO 2 and 3 reduce "
            "them inside it",
            (0, 1),
        )
    if "activations" in (pins.offload or ()):
        raise BadPin(
            pin="offload",
            value=offload_text(pins.offload or ()),
            reason="schedule='zero_bubble' reads what is saved a second time, for the gradients of "
            "weights, and it would be copied back twice",
            allowed=("none", "optimizer"),
        )
    if "parameters" in (pins.offload or ()):
        raise BadPin(
            pin="offload",
            value=offload_text(pins.offload or ()),
            reason="schedule='zero_bubble' has the gradients of weights apart, and parameters on "
            "the host are copied up for the forward and the backward alone",
            allowed=("none", "optimizer"),
        )
    if pins.ort not in (None, "auto", "off"):
        raise BadPin(
            pin="ort",
            value=pins.ort,
            reason="schedule='zero_bubble' takes the weight gradients out of the backward, and a "
            "region would hold both",
            allowed=("auto", "off"),
        )


def _check_loss(pins: Pins, step: StepGraph) -> None:
    if step.has_loss:
        return
    for name in ("pipeline", "interleave", "microbatches"):
        if (getattr(pins, name) or 1) > 1:
            raise NoLoss(asked=f"{name}={getattr(pins, name)}")
    if any(stage for _, stage in pins.stages or ()):
        raise NoLoss(asked=f"stages={dict(pins.stages or ())}")
    if pins.cuts:
        raise NoLoss(asked=f"cuts={pins.cuts}")
    if pins.precision == "fp16":
        raise BadPin(
            pin="precision",
            value="fp16",
            reason="fp16 scales the loss before it is differentiated, and skips steps "
            "that overflow; the loss is outside of the graph, and loss_fn= puts it inside",
            allowed=("bf16", "fp32"),
        )
    if pins.outputs == "loss":
        raise NoLoss(asked="outputs='loss'")
    for name in ("tensor", "context", "expert", "zero"):
        whole = 0 if name == "zero" else 1
        if (getattr(pins, name) or whole) > whole:
            raise BadPin(
                pin=name,
                value=getattr(pins, name),
                reason="with a loss outside of the graph only the batch is split; loss_fn= puts "
                "it inside",
                allowed=(str(whole),),
            )
    if min(pins.zeros) > 0:
        reason = "with a loss outside of the graph nothing is in shards; loss_fn= puts it inside"
        raise _without_zero(pins, reason)


def _check_batch(pins: Pins, batch: int, limits: Limits) -> None:
    for axis, limit in (("data", limits.data), ("microbatches", limits.microbatches)):
        if limit is not None and (getattr(pins, axis) or 1) > 1:
            name = "microbatch" if axis == "microbatches" else axis
            raise SplitRefused(axis=name, op="the loss", module="", reason=limit)
    data, microbatches = pins.data or 1, pins.microbatches or 1
    if batch % (data * microbatches):
        allowed = divisors(batch // data) if batch % data == 0 else ()
        raise BatchNotDivisible(batch=batch, microbatches=microbatches, data=data, allowed=allowed)


def base_plan(pins: Pins, devices: int, batch: int, graph: str, cluster: str, outputs: str) -> Plan:
    """The plan on which the search builds: what was pinned and does not depend on the mesh."""
    return Plan(
        devices=devices,
        precision=PRECISIONS[pins.precision or "fp32"],
        bucket_bytes=pins.bucket_bytes or Plan.bucket_bytes,
        loss_chunk=pins.loss_chunk or 0,
        outputs=outputs,
        tensor=pins.tensor or 1,
        context=pins.context or 1,
        expert=pins.expert or 1,
        order=pins.order or AXES,
        zero=min(pins.zeros),
        gather_again=True if pins.gather_again is None else pins.gather_again,
        cast_once=bool(pins.cast_once),
        accumulation=pins.accumulation or "whole",
        placements=pins.pins or (),
        sequence=pins.sequence is not False,
        context_by=pins.context_by or "",
        scatter_sends=bool(pins.scatter_sends),
        ort="auto" if pins.ort is None else pins.ort,
        fallback=pins.fallback or "error",
        compile=pins.compile or "off",
        cuda_graphs=bool(pins.cuda_graphs),
        offload=pins.on_host,
        batch=batch,
        pinned=pins.names,
        graph=graph,
        cluster=cluster,
    )
