"""What the user decided, as plain fields. Everything left out is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isqrt

from graphaccel.errors import ScheduleRefused, SplitRefused
from graphaccel.ir.program import Sharded
from graphaccel.messages import Location
from graphaccel.planner.order import AXES
from graphaccel.planner.plan import Plan, Precision

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
COUNTS = (
    "data", "pipeline", "tensor", "context", "expert", "interleave", "microbatches", "bucket_bytes",
    "loss_chunk",
)  # fmt: skip
SWITCHES = ("sequence", "scatter_sends", "cast_once", "cuda_graphs")
NAMES = (
    *COUNTS, "order", "recompute", "precision", "schedule", "cuts", "outputs",
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
class Limit:
    """An op that does not allow a split of the batch, and why. module: its path. location: of the
    line that calls it. outside: the loss is not part of the step."""

    op: str
    module: str
    reason: str
    location: Location | None = None
    outside: bool = False

    def __str__(self) -> str:
        return (
            f"{self.op} in {self.module or 'the model'}: {self.reason}" if self.op else self.reason
        )

    def refused(self, axis: str) -> SplitRefused:
        """The error. axis: "microbatch" or "data"."""
        return SplitRefused(
            axis=axis,
            op=self.op,
            module=self.module,
            location=self.location,
            reason=self.reason,
            outside=self.outside,
        )

    def refused_schedule(self, schedule: str) -> ScheduleRefused:
        """The error of a schedule that does not run all forwards before any backward."""
        return ScheduleRefused(
            schedule=schedule,
            op=self.op,
            module=self.module,
            location=self.location,
            reason=self.reason,
        )


@dataclass(frozen=True)
class Limits:
    """What the graph does not allow; None where it does. head: the op for which several
    microbatches need a schedule that runs all forwards before any backward (`rules.head`)."""

    microbatches: Limit | None = None
    data: Limit | None = None
    head: Limit | None = None


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
