"""Peak tensor bytes per pipeline rank: liveness over the very graphs and actions that will run.

Storages, not tensors, are counted: views cost nothing. A storage lives from the node that makes it
to its last use; what the executor holds besides (parameters, the batch, gradient buckets,
activations saved for a backward, messages) lives as long as `schedule.walk` says. Because the same
graphs run, the result equals the measured peak; allocator reserve and contexts are added by the
caller as a stated margin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.ir.values import shares, tensors_of
from graphaccel.kernels.register import fusion_of, is_backward
from graphaccel.planner.plan import StageMemory
from graphaccel.rules.propagate import PARTIAL
from graphaccel.schedule.table import Action, Schedule
from graphaccel.schedule.walk import walk

_HELD = {
    "parameter", "buffer", "constant", "batch", "prologue", "accumulator", "bucket", "scale",
    "shards", "tangent",
}  # fmt: skip
_SENDING = {  # what they send is held until what they give is waited for
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


@dataclass(frozen=True)
class Resident:
    """Bytes that lie on a rank the whole time. parameters, buffers: by name, as they rest. batch:
    the global batch.

    states: trained parameter → bytes of that part of it whose optimizer state lies here.
    optimizer_bytes: per byte of `states` (2.0 for AdamW in the parameter's dtype).
    """

    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    states: Mapping[str, int]
    batch: int
    optimizer_bytes: float


def rank_memory(
    program: StepProgram, schedule: Schedule, rank: int, resident: Resident, other: int = 0
) -> StageMemory:
    """The peak of one pipeline rank. other: bytes added for context and allocator reserve."""
    stages = {a.stage for a in schedule[rank]}
    own = [p for p in program.stages if p.stage in stages]
    names = {n for p in own for n in p.parameters}
    parameters = sum(resident.parameters[n] for n in names)
    trained = sum(resident.states.get(n, 0) for n in names)
    buffers = sum(resident.buffers[n] for n in {n for p in own for n in p.buffers})
    optimizer = int(trained * resident.optimizer_bytes)
    run = _Run(program, own, max((a.microbatch for a in schedule[rank]), default=0))
    run.start(resident.batch)
    for doing in walk(schedule[rank]):
        run.do(doing.verb, doing.action)
    fixed = parameters + buffers + optimizer
    return StageMemory(
        rank=rank,
        parameter=parameters + buffers,
        gradient=run.at_peak.get("gradient", 0),
        optimizer=optimizer,
        activation=run.at_peak.get("activation", 0),
        temporary=run.at_peak.get("temporary", 0),
        other=other,
        peak=fixed + run.peak + other,
        at=run.where,
    )


@dataclass(frozen=True)
class Sample:
    """What lies on a rank at one time of a step: bytes by category, and what is being computed."""

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
) -> tuple[Sample, ...]:
    """The bytes on one pipeline rank in the course of a step; their maximum is `rank_memory`'s.

    spans: (start, end) in seconds of each forward and backward, by (kind, stage, microbatch); the
    nodes of one lie evenly in it. most: about how many samples are kept; of every stretch that
    is left out, the fullest is.
    """
    whole = rank_memory(program, schedule, rank, resident, other)
    own = [p for p in program.stages if p.stage in {a.stage for a in schedule[rank]}]
    last = max((a.microbatch for a in schedule[rank]), default=0)
    run = _Run(program, own, last, watched=True)
    run.start(resident.batch)
    fixed = {"parameter": whole.parameter, "optimizer": whole.optimizer, "other": other}
    samples: list[Sample] = []

    def snapshot(when: float, live: Mapping[str, int], at: str) -> Sample:
        kinds = {kind: live.get(kind, 0) for kind in ("gradient", "activation", "temporary")}
        return Sample(when, {**fixed, **kinds}, at)

    samples.append(snapshot(0.0, run.live, "start of the step"))
    doings = list(walk(schedule[rank]))
    pieces = max(1, min(16, most // max(1, sum(d.verb == "run" for d in doings))))
    for doing in doings:
        action = doing.action
        if doing.verb != "run":
            run.do(doing.verb, action)
            continue
        start, end = spans[action.kind, action.stage, action.microbatch]
        samples.append(snapshot(start, run.live, f"before {action.kind} {action.microbatch}"))
        run.seen.clear()
        run.do(doing.verb, action)
        step = (end - start) / max(1, len(run.seen))
        size = max(1, -(-len(run.seen) // pieces))
        for first in range(0, len(run.seen), size):
            chunk = run.seen[first : first + size]
            top = max(range(len(chunk)), key=lambda i: sum(chunk[i][0].values()))
            live, at = chunk[top]
            samples.append(snapshot(start + (first + top + 0.5) * step, live, at))
        samples.append(snapshot(end, run.live, f"end of {action.kind} {action.microbatch}"))
    return tuple(samples)


@dataclass
class _Storage:
    size: int
    kind: str
    holders: int = 0


@dataclass
class _Run:
    """Counts bytes while walking through a rank's actions."""

    program: StepProgram
    own: list[StageProgram]
    last: int = 0
    peak: int = 0
    where: str = "start of the step"
    at_peak: dict[str, int] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    saved: dict[tuple[int, int], dict[str, list[_Storage]]] = field(default_factory=dict)
    inbox: dict[tuple[int, int, str], dict[str, list[_Storage]]] = field(default_factory=dict)
    sending: dict[tuple[int, int, int, str], list[_Storage]] = field(default_factory=dict)
    watched: bool = False
    seen: list[tuple[dict[str, int], str]] = field(default_factory=list)
    outputs: dict[int, list[_Storage]] = field(default_factory=dict)
    carried: dict[tuple[int, str], list[_Storage]] = field(default_factory=dict)

    def start(self, batch: int) -> None:
        self.take(_Storage(batch, "activation"))
        if self.program.prologue is not None:
            graph = self.program.prologue.graph
            inputs = {n: [] for n in graph.graph.nodes if n.op == "placeholder"}
            self.graph(graph, inputs, "prologue", -1)
        for stage in self.own:
            graph, values = stage.gradients()
            if graph is None or not stage.buckets:
                continue
            for node, value in zip(_placeholders(graph), values, strict=True):
                if value.kind == "accumulator":
                    self.take(_Storage(_bytes(node.meta["val"]), "gradient"))

    def take(self, storage: _Storage) -> None:
        if storage.holders == 0:
            self.live[storage.kind] += storage.size
            total = sum(self.live.values())
            if total > self.peak:
                self.peak, self.at_peak, self.where = total, dict(self.live), self.here
        storage.holders += 1

    def drop(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.live[storage.kind] -= storage.size

    here: str = "start of the step"

    def do(self, verb: str, action: Action) -> None:
        if verb == "post":
            self.post(action)
        elif verb == "run":
            outside = bool(self.program.tangents)
            if outside and action.kind == "backward":
                self.handed_in(self._stage(action.stage))
            self.run(action)
            if outside and action.kind == "forward":
                self.handed_out()
        elif verb == "release":
            for storage in self.sending.pop(_key(action), []):
                self.drop(storage)

    def handed_out(self) -> None:
        """A loss outside of the graph is that of the whole batch: outputs are brought to every
        rank, and live as long as the script's loss."""
        self.here = "outputs of the whole batch"
        for leaf, local in self.outputs.items():
            place = self.program.output_places[leaf]
            if self.program.data > 1 and (isinstance(place, int) or place == PARTIAL):
                size = sum(storage.size for storage in local)
                self.take(_Storage(size * self._parts(place), "activation"))
                for storage in local:
                    self.drop(storage)

    def handed_in(self, stage: StageProgram) -> None:
        """The gradients of the outputs that the loss reads, whole. What the script's own
        loss keeps and makes is not known and not counted."""
        self.here = "gradients of the outputs"
        graph = next(iter(stage.backwards.values()))
        for node, value in zip(_placeholders(graph), stage.backward_inputs, strict=True):
            if value.kind == "tangent":
                place, size = self.program.output_places[value.leaf], _bytes(node.meta["val"])
                self.take(_Storage(size * self._parts(place), "activation"))
                if self._parts(place) > 1 and place != 0:  # its part is no run of memory
                    self.take(_Storage(size, "activation"))

    def _parts(self, place: str | int) -> int:
        return self.program.data if isinstance(place, int) else 1

    def post(self, action: Action) -> None:
        stage = self._stage(action.stage)
        box = self.inbox.setdefault((action.stage, action.microbatch, action.direction), {})
        for node, value in _received(stage, action.direction):
            if value.peers == (action.peer,):
                storage = _Storage(_bytes(node.meta["val"]), "activation")
                self.take(storage)
                box[value.name] = [storage]

    def run(self, action: Action) -> None:
        stage = self._stage(action.stage)
        first, last = action.microbatch == 0, action.microbatch == self.last
        graph, values, outputs = stage.phase(action.kind, first, last)
        box = self.inbox.pop((action.stage, action.microbatch, action.kind), {})
        key = (action.stage, action.microbatch)
        saved = {} if action.kind == "forward" else self.saved.pop(key, {})
        inputs: dict[fx.Node, list[_Storage]] = {}
        for node, value in zip(_placeholders(graph), values, strict=True):
            given = box if value.kind == "received" else saved
            if value.kind == "carried":
                inputs[node] = self.carried.pop((action.stage, value.name), [])
            else:
                inputs[node] = [] if value.kind in _HELD else given[value.name]
        results = self.graph(
            graph, inputs, f"{action.kind} of microbatch {action.microbatch}", action.stage
        )
        self.deliver(action, outputs, results)

    def deliver(
        self, action: Action, outputs: Sequence[Value], results: list[list[_Storage]]
    ) -> None:
        """Who holds what a graph returned; the caller's own hold on it is dropped."""
        local = {p.stage for p in self.own}
        for value, held in zip(outputs, results, strict=True):
            if value.kind == "saved":
                box = self.saved.setdefault((action.stage, action.microbatch), {})
                box[value.name] = [*held]
                self._hold(held)
            elif value.kind == "sent":
                for peer in value.peers:
                    self._hold(held)
                    if peer in local:
                        box = self.inbox.setdefault((peer, action.microbatch, action.kind), {})
                        box[value.name] = [*held]
                    else:
                        key = (action.stage, peer, action.microbatch, action.kind)
                        self.sending.setdefault(key, []).extend(held)
            elif value.kind == "carried":
                for storage in held:
                    self._recount(storage, "gradient")
                self.carried[action.stage, value.name] = [*held]
                self._hold(held)
            elif value.kind in ("gradient", "input_gradient", "output", "buffer", "loss"):
                for storage in held:
                    self._recount(storage, "gradient" if value.kind == "gradient" else "activation")
                self._hold(held)
                if value.kind == "output":
                    self.outputs[value.leaf] = [*held]
        for held in results:
            for storage in held:
                self.drop(storage)

    def _hold(self, held: Iterable[_Storage]) -> None:
        for storage in held:
            storage.holders += 1

    def _recount(self, storage: _Storage, kind: str) -> None:
        self.live[storage.kind] -= storage.size
        self.live[kind] += storage.size
        storage.kind = kind

    def graph(
        self, graph: fx.GraphModule, inputs: dict[fx.Node, list[_Storage]], name: str, stage: int
    ) -> list[list[_Storage]]:
        """Run a graph's liveness. Inputs in `inputs` are owned and die at their last use."""
        nodes = list(graph.graph.nodes)
        last = _last_uses(nodes)
        holds: dict[fx.Node, list[_Storage]] = {n: list(given) for n, given in inputs.items()}
        # tensor by tensor; None: of what is held all the time
        places: dict[fx.Node, Sequence[_Storage | None]] = {
            n: given or [None] * len(tensors_of(n.meta["val"])) for n, given in inputs.items()
        }
        results: list[list[_Storage]] = []
        for index, node in enumerate(nodes):
            if node.op == "output":
                for given in node.args[0]:
                    held = holds.get(given, []) if isinstance(given, fx.Node) else []
                    self._hold(held)
                    results.append(held)
            elif node.op == "call_function":
                self.here = _place(node, name, stage)
                mine: list[_Storage] = []
                here: list[_Storage | None] = []
                inside = node.all_input_nodes
                for tensor, origin in zip(tensors_of(node.meta["val"]), shares(node), strict=True):
                    if origin is None:
                        storage = _Storage(tensor.untyped_storage().nbytes(), "temporary")
                    else:
                        source = here if origin[0] < 0 else places[inside[origin[0]]]
                        storage = source[origin[1]]
                    here.append(storage)
                    if storage is not None:
                        self.take(storage)
                        mine.append(storage)
                places[node] = here
                holds[node] = mine
                scratch = _Storage(_scratch(node), "temporary")
                self.take(scratch)
                self.drop(scratch)
                if self.watched:
                    self.seen.append((dict(self.live), self.here))
            for dead in last[index]:
                for storage in holds.pop(dead, []):
                    self.drop(storage)
        for held in results:
            for storage in held:
                self._recount(storage, "activation") if storage.kind == "temporary" else None
        return results

    def _stage(self, number: int) -> StageProgram:
        return next(p for p in self.own if p.stage == number)


def _scratch(node: fx.Node) -> int:
    """Bytes that a call takes at its peak besides its results."""
    fusion = fusion_of(node.target)
    if fusion is None or fusion.workspace is None or is_backward(node.target):
        return node.meta.get("scratch", 0)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    return int(fusion.workspace(**dict(zip(fusion.inputs, values, strict=True))))


def _key(action: Action) -> tuple[int, int, int, str]:
    return (action.stage, action.peer, action.microbatch, action.direction)


def _place(node: fx.Node, name: str, stage: int) -> str:
    module = node.meta.get("module") or "outside any module"
    return f"stage {stage}, {name}, {module}" if stage >= 0 else name


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _received(stage: StageProgram, direction: str) -> list[tuple[fx.Node, Value]]:
    graph = stage.forward if direction == "forward" else next(iter(stage.backwards.values()))
    values = stage.forward_inputs if direction == "forward" else stage.backward_inputs
    pairs = zip(_placeholders(graph), values, strict=True)
    return [(n, v) for n, v in pairs if v.kind == "received"]


def _bytes(value: Any) -> int:
    return sum(
        t.numel() * t.element_size() for t in tensors_of(value) if isinstance(t, torch.Tensor)
    )


def _last_uses(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """For each position, the nodes whose last use it is (unused ones die where they are made)."""
    last = {node: i for i, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[source] = index
            if node.target is torch.ops._c10d_functional.wait_tensor.default:
                if source.target in _SENDING:
                    last |= dict.fromkeys(source.all_input_nodes, index)
    dead: list[list[fx.Node]] = [[] for _ in nodes]
    for node, index in last.items():
        dead[index].append(node)
    return dead
