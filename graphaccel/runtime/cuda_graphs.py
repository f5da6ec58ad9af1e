"""CUDA graphs: each action of a step is recorded once, and replayed in every later step.

A rank runs the same actions in the same order in every step, so each (the forward of microbatch 2
of stage 1) is a recording of its own, recorded and replayed in that order. All allocate from one
pool: memory that one action frees can be reused by the next ones, as in eager mode, and what an
action saves stays untouched until it is freed. Nothing in the pool outlives a step, so recordings
for other batch shapes share it. Inputs from outside and outputs are stored outside of the pool, at
fixed addresses:

    the batch, values of the prologue, the loss's scale   copied in at the start of a step
    messages from other ranks                             copied in before an action reads them
    messages to other ranks, buffers, outputs, the loss,
    shards of gradients                                   copied out by the recording itself
    gradients                                             added up in buckets, which are outside

NCCL collectives inside a stage are recorded with it. A recording waits at its end for the
collectives it started, as CUDA requires; so there is less overlap than without CUDA graphs.

The first steps run eagerly, so that libraries choose their kernels and allocate their workspaces;
the next one records. A recording contains addresses: if a bucket or a parameter moves, the step is
recorded anew, and after `MOST` times it runs eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Protocol

import torch
from torch import fx

from graphaccel.compat.torch.tensors import storage_uses
from graphaccel.errors import CaptureFailed, GraphsNeedGpu
from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.ir.values import is_dense, returned, tensors_of
from graphaccel.schedule.table import Action
from graphaccel.schedule.walk import walk

WARM, MOST = 2, 4
_LEAVING = frozenset({"loss", "output", "buffer", "gradient", "input_gradient", "sent"})
_HANDED_OUT = frozenset({"loss", "output", "gradient", "input_gradient", "carried"})
_ON_HOST = {
    "to_host": "copy to and from the host",
    "to_device": "copy to and from the host",
    "ahead": "copy to and from the host",
    "dropout_part": "draw a number on the host",
    "expert_rows": "send rows to the experts that they chose",
    "exchange_rows": "send rows to the experts that they chose",
}
_COUNTED = ("expert_product", "expert_gradient")
_ASKING = frozenset({"_local_scalar_dense", "item", "nonzero", "bincount", "masked_select"})
_MASKED = frozenset({"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})


class Recording(Protocol):
    """A recording of some work."""

    def replay(self) -> None:
        """Run the recorded work, on the memory it was recorded with."""
        ...


class Recorder(Protocol):
    """Makes recordings that share one memory pool, to be replayed one after the other in the order
    in which they were recorded."""

    def warm(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Run work that will be recorded later, where it will be recorded."""
        ...

    def record(self, run: Callable[[], None]) -> Recording:
        """Record what `run` launches on the device, without executing it. Tensors that `run`
        creates and that are still alive are in the pool."""
        ...


class CudaRecorder:
    """Records with torch.cuda.CUDAGraph, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._warmed = False

    def warm(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Run on that stream, so that what libraries allocate per stream exists before the
        recording."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self._warmed = True
        with torch.cuda.stream(self._stream):
            built = run()
        current.wait_stream(self._stream)
        return built

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record; other threads (NCCL's watchdog) may call the device meanwhile."""
        if self._warmed:  # the pool cannot use memory that the allocator caches
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self._warmed = False
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph


def recorder_for(device: torch.device) -> Recorder:
    """A recorder of a device. Raises GraphsNeedGpu (GA903) where there is none."""
    if device.type != "cuda":
        raise GraphsNeedGpu(device=device.type)
    return CudaRecorder(device)


def declined(stage: StageProgram) -> str | None:
    """Why a stage's actions cannot be recorded (what a call in it does), or None."""
    if stage.head is not None:
        return "need the whole batch at once"
    for graph in stage.graphs:
        for node in graph.graph.nodes:
            why = _refusal(node)
            if why is not None:
                return why
    return None


def _refusal(node: fx.Node) -> str | None:
    if node.op != "call_function" or node.target is getitem:
        return None
    namespace = getattr(node.target, "namespace", None)
    if namespace is None:
        return "run in ONNX Runtime"
    name = str(node.target).split(".")[1]
    if namespace == "graphaccel" and name in _ON_HOST:
        return _ON_HOST[name]
    counted = namespace == "graphaccel" and name.startswith(_COUNTED)
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [t for v in values for t in tensors_of(v)]
    if (
        counted
        or any(n.meta.get("chosen") for n in (node, *node.all_input_nodes))
        or any(not isinstance(s, int) for t in tensors for s in t.shape)
    ):
        return "have sizes that depend on data"
    masked = name in _MASKED and any(t.dtype == torch.bool for t in tensors_of(_indices(node)))
    if namespace == "aten" and (name in _ASKING or masked):
        return "ask the device for a value"
    if len({t.device.type for t in tensors}) > 1:
        return "copy to and from the host"
    return None


def _indices(node: fx.Node) -> Any:
    given: Any = node.args[1] if len(node.args) > 1 else ()
    return [n.meta.get("val") for n in given if isinstance(n, fx.Node)]


def notes(program: StepProgram) -> tuple[str, ...]:
    """The report's lines about the stages that are recorded and those that are not, by reason."""
    if program.bare is not None:
        return ("CUDA graphs: none, the script computes the loss",)
    reasons: dict[str, list[int]] = {}
    recorded = 0
    for stage in program.stages:
        why = declined(stage)
        if why is None:
            recorded += 1
        else:
            reasons.setdefault(why, []).append(stage.stage)
    said = f"CUDA graphs: the actions of {recorded} of {len(program.stages)} stages are recorded"
    for why, stages in sorted(reasons.items(), key=lambda row: row[1]):
        names = f"stages {stages[0]} to {stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        said += f"; not {names}, where calls {why}"
    return (said, "CUDA graphs have not run on a GPU yet")


def fixed_bytes(program: StepProgram, actions: Sequence[Action]) -> int:
    """Bytes at fixed addresses that recording adds to a step on one rank, without the batch:
    messages that are there at the same time, and outputs. An upper bound: messages of several edges
    share memory where they have one size."""
    inside = {a.stage for a in actions if declined(program.stages[a.stage]) is None}
    live: Counter[tuple[int, str]] = Counter()
    most: dict[tuple[int, str], int] = {}
    apart = {a.stage for a in actions if a.kind == "weight"}

    def change(stage: int, what: str, by: int) -> None:
        live[stage, what] += by
        most[stage, what] = max(most.get((stage, what), 0), live[stage, what])

    ways = ("forward", "backward")
    for doing in walk(actions):
        action = doing.action
        if action.stage not in inside:
            continue
        if doing.verb == "run" and action.kind in ways:
            change(action.stage, f"received {action.kind}", 1)
            change(action.stage, f"sent {action.kind}", 1)
        if doing.verb == "release":
            change(action.stage, f"sent {action.direction}", -1)
        end = "weight" if action.stage in apart else "backward"
        if doing.verb == "run" and action.kind == end:
            for kind in ways:
                change(action.stage, f"received {kind}", -1)
    size = 0
    for (number, what), count in most.items():
        stage, (way, kind) = program.stages[number], what.split()
        graph, values, results = stage.phase(kind, True, True)
        nodes = graph.graph.find_nodes(op="placeholder") if way == "received" else returned(graph)
        for value, node in zip(values if way == "received" else results, nodes, strict=True):
            if value.kind == way and not inside.issuperset(value.peers):
                size += count * _bytes(node)
    for number in inside:
        stage = program.stages[number]
        for value, node in zip(stage.forward_outputs, returned(stage.forward), strict=True):
            size += _bytes(node) if value.kind in ("loss", "output", "buffer") else 0
        kind = "weight" if number in apart else "backward"
        graph, _, results = stage.phase(kind, False, True)
        for value, node in zip(results, returned(graph), strict=True):
            size += _bytes(node) if value.kind == "carried" else 0
    return size


def _bytes(node: Any) -> int:
    values = tensors_of(node.meta["val"]) if isinstance(node, fx.Node) else []
    return sum(t.numel() * t.element_size() for t in values)


@dataclass(frozen=True, eq=False)
class ActionWork:
    """The computation of an action. action: (kind, stage, microbatch). graph: takes a boxed list
    `inputs`, and empties it. values, results: describe its inputs and outputs."""

    action: tuple[str, int, int]
    graph: Any
    inputs: list[Any]
    values: Sequence[Value]
    results: Sequence[Value]


@dataclass(frozen=True)
class _Slot:
    """A tensor at a fixed address: which memory of `_Slots`, and its layout there."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Slots:
    """Memory at fixed addresses, outside of the pool, for tensors that come from other ranks or
    leave the recording. Memory that no tensor uses any more is reused; in a replay that happens at
    the same points."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[tuple[torch.Tensor, int]] = []

    def take(self, like: torch.Tensor) -> tuple[_Slot, torch.Tensor]:
        """A free slot for a tensor like this one, and the tensor there."""
        place = next((i for i, known in enumerate(self._known) if _free(*known, like)), None)
        if place is None:
            place = len(self._known)
            flat = torch.empty(like.numel(), dtype=like.dtype, device=self._device)
            self._known.append((flat, storage_uses(flat)))
        whole = like if is_dense(like) else torch.empty(like.shape, device="meta")
        slot = _Slot(place, tuple(like.shape), tuple(whole.stride()))
        return slot, self.show(slot)

    def show(self, slot: _Slot) -> torch.Tensor:
        """The tensor of a slot."""
        return self._known[slot.place][0].as_strided(slot.shape, slot.strides)


def _free(flat: torch.Tensor, uses: int, like: torch.Tensor) -> bool:
    same = flat.dtype == like.dtype and flat.numel() == like.numel()
    return same and storage_uses(flat) == uses


@dataclass(frozen=True)
class _Recorded:
    """A recorded action. given: (input, slot) of tensors from other ranks. outputs: for each output
    its kind and the slot it is copied to, None where it stays in the pool."""

    recording: Recording
    given: tuple[tuple[int, _Slot], ...]
    outputs: tuple[tuple[str, _Slot | None], ...]


class StepGraphs:
    """The recordings of one executor's steps, for one batch shape.

    stages: those of this rank. The rank's executor calls `begin` at the start of a step and `end`
    at its end; between them it passes `run` every action of a stage that `records`.
    """

    def __init__(
        self,
        recorder: Recorder,
        stages: Mapping[int, StageProgram],
        microbatches: int,
        device: torch.device,
    ) -> None:
        self._recorder, self._last, self._device = recorder, microbatches - 1, device
        self._inside = frozenset(n for n, p in stages.items() if declined(p) is None)
        self._slots = _Slots(device)
        self._fixed: dict[Hashable, torch.Tensor] = {}
        self._known: dict[Hashable, dict[Hashable, _Recorded]] = {}
        self._now: dict[Hashable, _Recorded] | None = None
        self._key: Hashable = None
        self._steps = 0
        self.doing = "warm"

    def records(self, stage: int) -> bool:
        """Whether the actions of a stage are recorded."""
        return stage in self._inside

    @property
    def recorded(self) -> int:
        """How many times a step was recorded."""
        return len(self._known)

    def fixed(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor at the address where the recordings read it, with this step's value."""
        if name not in self._fixed:
            self._fixed[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        return self._fixed[name].copy_(tensor)

    def begin(self, tensors: Iterable[torch.Tensor], others: Iterable[Any] = ()) -> None:
        """Start a step. tensors: those that outlive a step and that recordings read or write.
        others: numbers of the batch, which are part of what is recorded."""
        self._steps += 1
        self._key = tuple(t.data_ptr() for t in tensors), tuple(map(repr, others))
        self._now = self._known.get(self._key)
        if self._now is not None:
            self.doing = "replay"
        elif self._steps <= WARM:
            self.doing = "warm"
        elif len(self._known) < MOST:
            self.doing, self._now = "record", {}
        else:
            self.doing = "left"  # addresses change all the time: no more recording

    def end(self) -> None:
        """Finish a step: its recordings are complete."""
        if self.doing == "record":
            assert self._now is not None
            self._known[self._key] = self._now
        self._now = None

    def run(self, work: ActionWork) -> Sequence[Any]:
        """The outputs of an action. A replay returns None for what stays in the pool: only other
        recordings read it.

        Raises CaptureFailed (GA904).
        """
        if self.doing == "warm":
            return self._recorder.warm(lambda: work.graph(work.inputs))
        if self.doing == "left":
            return work.graph(work.inputs)
        assert self._now is not None
        kept: list[Any]
        if self.doing == "record":
            built, kept = self._record(work)
            self._now[work.action] = built
        else:
            built, kept = self._now[work.action], [None] * len(work.results)
            for place, slot in built.given:
                self._slots.show(slot).copy_(work.inputs[place])
            work.inputs.clear()
        built.recording.replay()
        for place, (kind, slot) in enumerate(built.outputs):
            if slot is not None:
                shown = self._slots.show(slot)
                # The script may keep it: the next step must not overwrite it.
                kept[place] = shown.clone() if kind in _HANDED_OUT else shown
        return kept

    def _record(self, work: ActionWork) -> tuple[_Recorded, list[Any]]:
        kind, stage, microbatch = work.action
        given, inputs = [], work.inputs
        for place, value in enumerate(work.values):
            if value.kind == "received" and value.peers[0] not in self._inside:
                slot, shown = self._slots.take(inputs[place])
                inputs[place] = shown.copy_(inputs[place])
                given.append((place, slot))
        likes = [n.meta["val"] if isinstance(n, fx.Node) else None for n in returned(work.graph)]
        last = microbatch == self._last
        leaving = [
            self._slots.take(like) if like is not None and self._leaves(value, last) else None
            for value, like in zip(work.results, likes, strict=True)
        ]
        buckets = [t for t, v in zip(inputs, work.values, strict=True) if v.kind == "bucket"]
        kept: list[Any] = []

        def run() -> None:
            built = work.graph(inputs)
            for tensor in (*buckets, *built):  # those in flight; no-op for others
                if isinstance(tensor, torch.Tensor):
                    torch.ops._c10d_functional.wait_tensor(tensor)
            for target, tensor in zip(leaving, built, strict=True):
                kept.append(tensor if target is None else target[1].copy_(tensor))

        try:
            recording = self._recorder.record(run)
        except RuntimeError as error:
            raise CaptureFailed(
                stage=stage, phase=kind, cause=str(error).strip().splitlines()[0]
            ) from error
        built = tuple(
            (value.kind, None if target is None else target[0])
            for value, target in zip(work.results, leaving, strict=True)
        )
        return _Recorded(recording, tuple(given), built), kept

    def _leaves(self, value: Value, last: bool) -> bool:
        if value.kind == "carried":  # to the next microbatch, or the shards of a step's gradients
            return last
        inside = value.kind == "sent" and self._inside.issuperset(value.peers)
        return value.kind in _LEAVING and not inside
