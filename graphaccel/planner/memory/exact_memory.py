"""Exact peak tensor bytes per pipeline rank: liveness over the graphs and actions that will run.

`planner.memory.liveness` counts what a graph allocates and needs; what the executor holds besides
(parameters, the batch, gradient buckets, activations saved for a backward, messages) lives as long
as `schedule.walk` defines. Because exactly these graphs run, the result equals the measured peak;
allocator reserve and contexts are added by the caller as an explicit margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.ir.values import tensors_of
from graphaccel.planner.memory.graph_columns import Share, even
from graphaccel.planner.memory.liveness import Liveness, Storage
from graphaccel.planner.memory.phases import LOAD, STEP, Seen, phases_of
from graphaccel.planner.memory.resident import Resident
from graphaccel.planner.plan.offload import placed_optimizer, placed_parameters
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.schedule.table import Action, Schedule
from graphaccel.schedule.walk import last_actions, walk
from graphaccel.sharding.rules.batch_placement import PARTIAL, Placement, sharded_dim

_HELD = {
    "parameter",
    "buffer",
    "constant",
    "batch",
    "prologue",
    "accumulator",
    "bucket",
    "scale",
    "shards",
    "tangent",
    "held",
    "headed",
}
_GATHERED = ("joined", "summed", "same")  # what forwards give the head  # fmt: skip


UNEVEN = 1.25
"""Rows on a device as a multiple of an even share, for which a report gives the cost of uneven
choices: the capacity factor of Fedus et al., Switch Transformers, 2021, section 2.2."""


def rank_memory(
    program: StepProgram,
    schedule: Schedule,
    rank: int,
    resident: Resident,
    other: int = 0,
    chosen: Share = even,
) -> StageMemory:
    """The peak of one pipeline rank. other: bytes added for context and allocator reserve. chosen:
    module path → the rows that chose the device's experts there, over an even share."""
    stages = {a.stage for a in schedule[rank]}
    own = [p for p in program.stages if p.stage in stages]
    trained = sum(resident.states.get(n, 0) for n in {n for p in own for n in p.parameters})
    optimizer, host = placed_optimizer(
        int(trained * resident.optimizer_bytes), trained, resident.offload
    )
    count = resident.counted(chosen)
    run = _Run(program, own, schedule[rank], count)
    run.start(resident.batch)
    for doing in walk(schedule[rank]):
        run.do(doing.verb, doing.action)
    held, below = _held_bytes(own, resident)
    phases = phases_of(own, resident, run.seen(held, optimizer))
    most, peak, at = run.count.at_peak, phases.later, run.count.where
    if phases.step > peak:
        peak, at, most = phases.step, STEP, dict(run.count.live)
        most["temporary"] = most.get("temporary", 0) + run.optimizer_temporary(resident)
    if phases.load > peak:
        peak, at, optimizer = phases.load, LOAD, 0
        most = {"activation": resident.batch, "temporary": phases.load - held - resident.batch}
    return StageMemory(
        rank=rank,
        parameter=held + most.get("parameter", 0),
        gradient=most.get("gradient", 0),
        optimizer=optimizer,
        activation=most.get("activation", 0),
        temporary=most.get("temporary", 0),
        other=other,
        peak=peak + other,
        at=at,
        host=host + below + run.count.host_peak,
        phases=phases,
    )


def _held_bytes(own: Sequence[StageProgram], resident: Resident) -> tuple[int, int]:
    """Bytes of parameters and buffers as the rank holds them, each counted once: on the device, and
    on the host without those that the optimizer has there."""
    parameters = {n for p in own for n in p.parameters}
    buffers = {n for p in own for n in p.buffers}
    held_bytes = {n: resident.parameters[n] for n in parameters}
    trained = sum(size for n, size in held_bytes.items() if n in resident.states)
    here, below = placed_parameters(sum(held_bytes.values()), trained, resident.offload)
    return here + sum(resident.buffers[n] for n in buffers), below


@dataclass(frozen=True)
class Sample:
    """What a rank holds at one time of a step: bytes by category, and what is being computed."""

    seconds: float
    live: Mapping[str, int]
    at: str

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.live.values())


def rank_curve(
    program: StepProgram,
    schedule: Schedule,
    rank: int,
    resident: Resident,
    spans: Mapping[tuple[str, int, int], tuple[float, float]],
    other: int = 0,
    most: int = 600,
    chosen: Share = even,
) -> tuple[Sample, ...]:
    """The bytes on one pipeline rank over the course of a step; their maximum is that of
    `rank_memory`.

    spans: (start, end) in seconds of each forward and backward, by (kind, stage, microbatch); its
    nodes are assumed to be spaced evenly. most: about how many samples to return; where samples are
    left out, the one with most bytes is kept. chosen: see `rank_memory`.
    """
    whole = rank_memory(program, schedule, rank, resident, other, chosen)
    own = [p for p in program.stages if p.stage in {a.stage for a in schedule[rank]}]
    doings = list(walk(schedule[rank]))
    pieces = max(1, min(16, most // max(1, sum(d.verb == "run" for d in doings))))
    count = resident.counted(chosen, pieces)
    run = _Run(program, own, schedule[rank], count)
    run.start(resident.batch)
    held = {
        "parameter": _held_bytes(own, resident)[0],
        "optimizer": whole.optimizer,
        "other": other,
    }
    kinds = ("parameter", "optimizer", "other", "gradient", "activation", "temporary")
    samples: list[Sample] = []

    def snapshot(when: float, live: Mapping[str, int], at: str) -> Sample:
        return Sample(when, {k: held.get(k, 0) + live.get(k, 0) for k in kinds}, at)

    live = run.count.live
    samples.append(snapshot(0.0, live, "start of the step"))
    for doing in doings:
        action = doing.action
        if doing.verb != "run":
            run.do(doing.verb, action)
            continue
        start, end = spans[action.kind, action.stage, action.microbatch]
        samples.append(snapshot(start, live, f"before {action.kind} {action.microbatch}"))
        run.do(doing.verb, action)
        for far, then, at in run.count.seen:
            samples.append(snapshot(start + far * (end - start), then, at))
        samples.append(snapshot(end, live, f"end of {action.kind} {action.microbatch}"))
    result = live.get("temporary", 0) + run.optimizer_temporary(resident)
    samples.append(snapshot(samples[-1].seconds, {**live, "temporary": result}, STEP))
    return tuple(samples)


@dataclass
class _Run:
    """Counts bytes while walking through a rank's actions."""

    program: StepProgram
    own: list[StageProgram]
    actions: Sequence[Action]
    count: Liveness = field(default_factory=Liveness)
    saved: dict[tuple[int, int], dict[str, list[Storage]]] = field(default_factory=dict)
    inbox: dict[tuple[int, int, str], dict[str, list[Storage]]] = field(default_factory=dict)
    sending: dict[tuple[int, int, int, str], list[Storage]] = field(default_factory=dict)
    outputs: dict[int, list[Storage]] = field(default_factory=dict)
    carried: dict[tuple[int, str], list[Storage]] = field(default_factory=dict)
    held: dict[int, list[Storage]] = field(default_factory=dict)
    gathered: dict[str, list[list[Storage]]] = field(default_factory=dict)
    received: dict[tuple[int, str], list[tuple[int, Value]]] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def __post_init__(self) -> None:
        self.last = max((a.microbatch for a in self.actions), default=0)
        self.last_of_stage = last_actions(self.actions)
        self.outside = bool(self.program.tangents)  # whether the script computes the loss

    def start(self, batch: int) -> None:
        self._start(batch)
        self.most["forward"] = self.count.peak

    def _start(self, batch: int) -> None:
        self.count.take(Storage(batch, "activation"))
        if self.program.prologue is not None:
            graph = self.program.prologue.graph
            self.count.run(graph, [[] for _ in _placeholders(graph)], "prologue", -1)
        for stage in self.own:
            self.prepare(stage)
        for stage in self.own:
            graph, values = stage.gradients()
            if graph is None or not stage.buckets:
                continue
            for node, value in zip(_placeholders(graph), values, strict=True):
                if value.kind == "accumulator":
                    self.count.take(Storage(_bytes(node.meta["val"]), "gradient"))

    def prepare(self, stage: StageProgram) -> None:
        """Count what is held for all microbatches of a stage."""
        if stage.prepare is None:
            return
        given: list[list[Storage]] = [[] for _ in stage.prepare_inputs]
        results = self.count.run(stage.prepare, given, "parameters", stage.stage)
        self.held[stage.stage] = [storage for held in results for storage in held]
        for storage in self.held[stage.stage]:
            self.count.recount(storage, "parameter")

    def seen(self, held: int, optimizer: int) -> Seen:
        """The results of a walk through the step. held, optimizer: bytes that the rank holds
        throughout."""
        most, count = self.most, self.count
        return Seen(held, optimizer, most["forward"], most["backward"], count.peak, count.total)

    def optimizer_temporary(self, resident: Resident) -> int:
        """Temporary bytes of the optimizer's step."""
        return resident.step(sorted({n for p in self.own for n in p.parameters}))

    def do(self, verb: str, action: Action) -> None:
        """Count one item of the walk, and the peak during it by phase."""
        count = self.count
        before = count.peak, count.at_peak, count.where
        count.peak = count.total
        self._do(verb, action)
        phase = "forward" if "forward" in (action.kind, action.direction) else "backward"
        self.most[phase] = max(self.most[phase], count.peak)
        if count.peak <= before[0]:
            count.peak, count.at_peak, count.where = before

    def _do(self, verb: str, action: Action) -> None:
        if verb == "post":
            self.post(action)
        elif verb == "run":
            if self.outside and action.kind == "backward":
                self.handed_in(self._stage(action.stage))
            self.run(action)
            if self.outside and action.kind == "forward":
                self.handed_out()
        elif verb == "release":
            for storage in self.sending.pop(_key(action), []):
                self.count.drop(storage)

    def handed_out(self) -> None:
        """A loss outside of the graph is computed on the global batch: outputs are gathered to
        every rank, and live as long as the script's loss."""
        self.count.here = "outputs of the whole batch"
        for leaf, local in self.outputs.items():
            place = self.program.output_places[leaf]
            at = sharded_dim(place)
            if self.program.data > 1 and (at is not None or place == PARTIAL):
                size = sum(storage.size for storage in local)
                whole = Storage(size * self._parts(place), "activation")
                self.count.take(whole)
                if at not in (None, (0, 1)):  # copied to the model's order of dims
                    self.count.take(Storage(whole.size, "activation"))
                    self.count.drop(whole)
                for storage in local:
                    self.count.drop(storage)

    def handed_in(self, stage: StageProgram) -> None:
        """The gradients of the outputs that the loss reads, of the global batch. What the script's
        own loss saves and allocates is not known and not counted."""
        self.count.here = "gradients of the outputs"
        graph = next(iter(stage.backwards.values()))
        for node, value in zip(_placeholders(graph), stage.backward_inputs, strict=True):
            if value.kind == "tangent":
                place, size = self.program.output_places[value.leaf], _bytes(node.meta["val"])
                self.count.take(Storage(size * self._parts(place), "activation"))
                if self._parts(place) > 1 and place != 0:  # its part is not contiguous
                    self.count.take(Storage(size, "activation"))

    def _parts(self, place: Placement) -> int:
        return self.program.data if sharded_dim(place) is not None else 1

    def post(self, action: Action) -> None:
        stage = self._stage(action.stage)
        box = self.inbox.setdefault((action.stage, action.microbatch, action.direction), {})
        where = (action.stage, action.direction)
        if where not in self.received:
            self.received[where] = _received(stage, action.direction)
        for size, value in self.received[where]:
            if value.peers == (action.peer,):
                storage = Storage(size, "activation")
                self.count.take(storage)
                box[value.name] = [storage]

    def run(self, action: Action) -> None:
        stage = self._stage(action.stage)
        first, last = action.microbatch == 0, action.microbatch == self.last
        graph, values, outputs = stage.phase(action.kind, first, last)
        box = self.inbox.pop((action.stage, action.microbatch, action.kind), {})
        key = (action.stage, action.microbatch)
        saved = {} if action.kind == "forward" else self.saved.pop(key, {})
        inputs = []
        for value in values:
            given = box if value.kind == "received" else saved
            if value.kind in _GATHERED:
                inputs.append(self._whole(value, action.stage))
            elif value.kind == "carried":
                inputs.append(self.carried.pop((action.stage, value.name), []))
            else:
                inputs.append([] if value.kind in _HELD else given[value.name])
        name = f"{action.kind} of microbatch {action.microbatch}"
        results = self.count.run(graph, inputs, name, action.stage)
        if action in self.last_of_stage:
            for storage in self.held.pop(action.stage, ()):
                self.count.drop(storage)
        self.deliver(action, outputs, results)

    def _gather(self, value: Value, held: list[Storage]) -> None:
        """Hold what a forward passes to the head (`runtime.execution.parts`)."""
        known = self.gathered.setdefault(value.name, [])
        if known and value.kind != "joined":
            return
        if value.kind == "summed" and self.program.data * (self.last + 1) > 1:
            held = [Storage(s.size, "activation") for s in held]
            for storage in held:
                self.count.take(storage)
        else:
            self.count.hold(held)
        known.append(held)

    def _whole(self, value: Value, stage: int) -> list[Storage]:
        """The value of the global batch: joined over microbatches, then over data."""
        given = self.gathered.pop(value.name)
        if value.kind != "joined":
            return given[0]
        self.count.here = f"values of the whole batch, stage {stage}"
        size, data = sum(s.size for held in given for s in held), self.program.data
        storages = [s for held in given for s in held]
        if len(given) > 1:
            storages = self._instead(storages, [size])
        if data > 1:  # along a dim other than the first, a copy is sent, and the result is copied
            ahead = value.batch_dim > 0 or value.outer > 1
            storages = self._instead(storages, [*[size] * ahead, size * data])
            storages = self._instead(storages, [size * data]) if ahead else storages
        return storages

    def _instead(self, given: list[Storage], sizes: list[int]) -> list[Storage]:
        """Allocate storages one after another while `given` lives, then free all but the last."""
        storages = [Storage(size, "activation") for size in sizes]
        for storage in storages:
            self.count.take(storage)
        for storage in (*given, *storages[:-1]):
            self.count.drop(storage)
        return storages[-1:]

    def deliver(
        self, action: Action, outputs: Sequence[Value], results: list[list[Storage]]
    ) -> None:
        """Record who holds what a graph returned; the caller's own reference to it is dropped."""
        local = {p.stage for p in self.own}
        for value, held in zip(outputs, results, strict=True):
            if value.kind == "saved":
                box = self.saved.setdefault((action.stage, action.microbatch), {})
                box[value.name] = [*held]
                self.count.hold(held)
            elif value.kind == "sent":
                for peer in value.peers:
                    self.count.hold(held)
                    if peer in local:
                        box = self.inbox.setdefault((peer, action.microbatch, action.kind), {})
                        box[value.name] = [*held]
                    else:
                        key = (action.stage, peer, action.microbatch, action.kind)
                        self.sending.setdefault(key, []).extend(held)
            elif value.kind in _GATHERED:
                self._gather(value, held)
            elif value.kind == "headed":
                self.held.setdefault(action.stage, []).extend(held)
                self.count.hold(held)
            elif value.kind == "carried":
                for storage in held:
                    self.count.recount(storage, "gradient")
                self.carried[action.stage, value.name] = [*held]
                self.count.hold(held)
            elif value.kind in ("gradient", "input_gradient", "output", "buffer", "loss"):
                kind = "gradient" if value.kind == "gradient" else "activation"
                for storage in held:
                    self.count.recount(storage, kind)
                self.count.hold(held)
                if value.kind == "output":
                    self.outputs[value.leaf] = [*held]
        for held in results:
            for storage in held:
                self.count.drop(storage)

    def _stage(self, number: int) -> StageProgram:
        return next(p for p in self.own if p.stage == number)


def _key(action: Action) -> tuple[int, int, int, str]:
    return (action.stage, action.peer, action.microbatch, action.direction)


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _received(stage: StageProgram, direction: str) -> list[tuple[int, Value]]:
    """(bytes, value) of what a stage receives."""
    graph = stage.forward if direction == "forward" else next(iter(stage.backwards.values()))
    values = stage.forward_inputs if direction == "forward" else stage.backward_inputs
    pairs = zip(_placeholders(graph), values, strict=True)
    return [(_bytes(n.meta["val"]), v) for n, v in pairs if v.kind == "received"]


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(value))
