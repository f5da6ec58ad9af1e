"""Runs one step: a loop over this rank's list of actions.

The executor knows nothing of models or plans. It slices the batch, calls stage graphs, keeps the
tensors saved for their backward, sends and receives between stages, and returns the loss and the
gradients.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.compat.torch.optimizers import unscale
from graphaccel.errors import RankLost
from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.ir.values import returned
from graphaccel.runtime.bind import bind
from graphaccel.runtime.buckets import Buckets
from graphaccel.runtime.cuda_graphs import ActionWork, Recorder, StepGraphs
from graphaccel.runtime.inductor import StageCompiler
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import Mesh, axes_of
from graphaccel.runtime.messages import Messages, sent_values
from graphaccel.runtime.parameters.layout import Layout
from graphaccel.runtime.parts import Parts, over_data, part_of
from graphaccel.runtime.tf32 import rounding
from graphaccel.schedule.table import Action, Schedule
from graphaccel.schedule.walk import last_actions, walk
from graphaccel.sharding.rules.propagate import PARTIAL


@dataclass
class StepResult:
    """The results of one step on this rank.

    loss: scalar, the same on every rank. gradients: by parameter name, of this rank's stages.
    outputs: by leaf of what the model returned, for the whole batch, on every rank. overflow: of a
    step in fp16, nonzero if gradients of some rank overflowed. layouts: of the gradients that are
    sharded. inputs: gradients by batch leaf, where the script computes the loss.
    """

    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    outputs: dict[int, torch.Tensor]
    overflow: torch.Tensor | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """What a rank holds for the whole run, by name. parameters: as stored: shards of those that are
    sharded between uses. constants: lifted tensors of the model's code. shards: flat buffers of
    parameter groups, by the first name of each. gradients: layouts of those that are kept in
    shards."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    shards: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Layout] = field(default_factory=dict)


@dataclass
class StepState:
    """The state of one step on one rank."""

    leaves: list[Any]
    prologue: dict[str, torch.Tensor]
    scale: torch.Tensor | None = None
    accumulators: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    buckets: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    saved: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    held: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    parts: Parts = field(default_factory=lambda: Parts(1))
    headed: dict[str, torch.Tensor] = field(default_factory=dict)
    carried: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    inbox: dict[tuple[int, int, str], dict[str, torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    outbox: dict[tuple[int, int, int, str], dict[str, torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    summing: Any = None
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    tangents: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    seed: int | None = None


class Executor:
    """One rank's part of one compiled step.

    program: all stages (peers' too: the shapes of their values are needed). schedule: with
    messages. buckets: those of the session, if all its executors are to use the same memory. whole:
    every data rank runs the whole batch (evaluation). compiler: of stages, if any. products: the
    precision that float32 matmul inputs are rounded to ("tfloat32"), if any. recorder: of CUDA
    graphs, where actions are recorded.
    """

    def __init__(
        self,
        program: StepProgram,
        schedule: Schedule,
        mesh: Mesh,
        held: Held,
        microbatches: int,
        *,
        buckets: Buckets | None = None,
        whole: bool = False,
        compiler: StageCompiler | None = None,
        products: str = "",
        recorder: Recorder | None = None,
    ) -> None:
        self._products = products
        self._buckets = buckets or Buckets()
        self._data, self._data_index = (1, 0) if whole else (mesh.data, mesh.data_index)
        mesh.ensure(_axes_needed(program))
        self._alone = mesh.pipeline == 1 and (whole or mesh.data == 1)
        everyone = "pipeline" if whole else "pipeline+data"
        self._everyone = None if self._alone else mesh.group(everyone)
        self._program, self._mesh, self._held = program, mesh, held
        self._microbatches = microbatches
        self._actions = schedule[mesh.pipeline_index]
        self._doings = tuple(walk(self._actions))
        self._last_of_stage = last_actions(self._actions)
        heads = [a for a in self._actions if a.kind == "head"]
        self._loss_known = heads or [a for a in self._actions if a.kind == "forward"][-1:]
        self._stages = {
            p.stage: p for p in program.stages if p.stage % mesh.pipeline == mesh.pipeline_index
        }
        self._messages = Messages(program, mesh, microbatches)
        self._reached = program.reached
        self._written = [
            (name, maker, tuple(sorted({s % mesh.pipeline for s in stages})))
            for name, (maker, stages) in sorted(program.written.items())
        ]
        mesh.ensure_shared(places for _, _, places in self._written)
        for stage in self._stages.values():
            for graph in stage.graphs:
                bind(graph, mesh)
        self.graphs = None
        if recorder is not None:  # what is recorded is determined before the graphs are compiled
            self.graphs = StepGraphs(recorder, self._stages, microbatches, mesh.device)
        self._compiler = compiler
        if compiler is not None:
            self._stages = {n: self._compiled(p) for n, p in self._stages.items()}

    def _compiled(self, stage: StageProgram) -> StageProgram:
        assert self._compiler is not None
        return self._compiler.stage(stage)

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Lifted tensors of the model's code, in the memory that the graphs read."""
        return self._held.constants

    @torch.no_grad()
    def run(self, leaves: Sequence[Any], scale: LossScale | None = None) -> StepResult:
        """Run one step on the leaves of the whole global batch.

        scale: of the loss, for fp16; gradients are returned unscaled.
        Raises RankLost (GA501) when another rank does not answer.
        """
        state = self._begin(leaves)
        if scale is not None:
            graphs, factor = self.graphs, scale.factor
            state.scale = factor.clone() if graphs is None else graphs.fixed("scale", factor)
        doing_now: Action | None = None
        done: Action | None = None
        generator = torch.random.get_rng_state() if state.seed is not None else None
        try:
            for doing in self._doings:
                done, doing_now = doing_now, doing.action
                if doing.verb == "post":
                    self._messages.post(doing.action)
                elif doing.verb == "wait":
                    key = (doing.action.stage, doing.action.microbatch, doing.action.direction)
                    state.inbox[key] |= self._messages.wait(doing.action)
                elif doing.verb == "run":
                    self._compute(doing.action, state)
                elif doing.verb == "send":
                    key = (
                        doing.action.stage,
                        doing.action.peer,
                        doing.action.microbatch,
                        doing.action.direction,
                    )
                    self._messages.send(doing.action, state.outbox.pop(key))
                elif doing.verb == "release":
                    self._messages.release(doing.action)
                else:
                    self._reduce(doing.action, state)
            done, doing_now = doing_now, None
            result = self._finish(state)
            if self.graphs is not None:
                self.graphs.end()
            return result if scale is None else self._unscaled(result, scale)
        except RuntimeError as error:
            if self._mesh.world > 1 and is_connection(error):
                raise self._lost(done, doing_now, error) from error
            raise
        finally:
            if generator is not None:
                torch.random.set_rng_state(generator)

    def _begin(self, leaves: Sequence[Any]) -> StepState:
        state = StepState([self._brought(i, leaf) for i, leaf in enumerate(leaves)], {})
        state.parts = Parts(self._data * self._microbatches)
        prologue = self._program.prologue
        if prologue is not None:
            given = [self._whole(v, state) for v in prologue.inputs]
            state.prologue = dict(zip(prologue.outputs, prologue.graph(given), strict=True))
        if self.graphs is not None:
            self._make_room(state)
            self._begin_graphs(self.graphs, state)
            self._prepare(state)
        else:
            self._prepare(state)
            self._make_room(state)
        if self._program.random and (self._mesh.world > 1 or self._microbatches > 1):
            # One draw per step from the generator that all ranks share; each part of the batch has
            # a random stream of its own.
            state.seed = int(torch.randint(2**62, ()).item())
        return state

    def _brought(self, place: int, leaf: Any) -> Any:
        """A leaf of the batch on this rank's device, contiguous."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.graphs is not None:
            return self.graphs.fixed(("batch", place), leaf)
        return leaf.contiguous().to(self._mesh.device)

    def _begin_graphs(self, graphs: StepGraphs, state: StepState) -> None:
        held, inner = self._held, state.accumulators.values()
        resting = (held.parameters, held.buffers, held.constants, held.shards, *inner)
        tensors = [t for some in resting for t in some.values()]
        graphs.begin(tensors, [x for x in state.leaves if not isinstance(x, torch.Tensor)])
        state.prologue = {n: graphs.fixed(("prologue", n), t) for n, t in state.prologue.items()}

    def _prepare(self, state: StepState) -> None:
        """Start the all-gathers of parameters that are held for all microbatches."""
        for number, stage in self._stages.items():
            if stage.prepare is not None:
                given = [self._lying(v) for v in stage.prepare_inputs]
                names = (v.name for v in stage.prepare_outputs)
                values, results = stage.prepare_inputs, stage.prepare_outputs
                action = "prepare", number, 0
                made = self._made(ActionWork(action, stage.prepare, given, values, results))
                state.held[number] = dict(zip(names, made, strict=True))

    def _made(self, work: ActionWork) -> Sequence[Any]:
        """The outputs of a graph."""
        if self.graphs is None or not self.graphs.records(work.action[1]):
            return work.graph(work.inputs)
        return self.graphs.run(work)

    def _lying(self, value: Value) -> torch.Tensor:
        held = self._held.shards if value.kind == "shards" else self._held.parameters
        return held[value.name]

    def _make_room(self, state: StepState) -> None:
        """Allocate the buckets that gradients are accumulated in."""
        for number, stage in self._stages.items():
            if stage.buckets:
                made = self._buckets.of(stage, self._mesh.device)
                state.accumulators[number], state.buckets[number] = made

    def _whole(self, value: Value, state: StepState) -> Any:
        if value.kind == "batch":
            return state.leaves[value.leaf]
        held = self._held.buffers if value.kind == "buffer" else self._held.constants
        return held[value.name]

    def _compute(self, action: Action, state: StepState) -> None:
        stage = self._stages[action.stage]
        if state.seed is not None:
            torch.manual_seed((state.seed + 7919 * self._stream(action) + action.stage) % 2**63)
        first, last = action.microbatch == 0, action.microbatch == self._microbatches - 1
        graph, values, results = stage.phase(action.kind, first, last)
        saved: dict[str, Any] = {}
        if action.kind not in ("forward", "head"):
            saved = state.saved.pop((action.stage, action.microbatch), {})
        box = state.inbox.pop((action.stage, action.microbatch, action.kind), {})
        inputs = [self._input(v, action, state, saved, box) for v in values]
        saved.clear()
        box.clear()
        key = action.kind, action.stage, action.microbatch
        with rounding(self._products):
            outputs = self._made(ActionWork(key, graph, inputs, values, results))
        if action in self._last_of_stage:
            state.held.pop(action.stage, None)
            if self._stages[action.stage].head is not None:
                state.headed.clear()
        self._deliver(action, results, outputs, state)
        if action in self._loss_known:
            self._start_loss(state)

    def _part(self, microbatch: int) -> int:
        return self._data_index * self._microbatches + microbatch

    def _stream(self, action: Action) -> int:
        """Index of the random stream: one per part of the batch, and one for what runs on all of
        it."""
        if action.kind == "head":
            return self._data * self._microbatches
        return self._part(action.microbatch)

    def _input(
        self,
        value: Value,
        action: Action,
        state: StepState,
        saved: dict[str, Any],
        box: dict[str, Any],
    ) -> Any:
        kind = value.kind
        if kind in ("parameter", "shards"):
            return self._lying(value)
        if kind == "held":
            return state.held[action.stage][value.name]
        if kind == "carried":  # the first microbatch has none
            return state.carried.pop((action.stage, value.name), None)
        if kind == "saved":
            return saved[value.name]
        if kind == "received":
            return box[value.name]
        if kind == "batch":
            return self._slice(value, action.microbatch, state)
        if kind == "buffer":
            return state.before.get(value.name, self._held.buffers[value.name])
        if kind == "constant":
            return self._held.constants[value.name]
        if kind in ("joined", "summed", "same"):
            return state.parts.whole(value, self._data, self._mesh)
        if kind in ("prologue", "headed"):
            known = state.prologue if kind == "prologue" else state.headed
            part = self._part(action.microbatch)
            return part_of(known[value.name], value, part, self._data * self._microbatches)
        if kind == "scale":
            return state.scale
        if kind == "tangent":
            return state.tangents.pop(value.leaf)
        if kind == "accumulator":
            return state.accumulators[action.stage][value.name]
        return state.buckets[action.stage][int(value.name)]

    def _slice(self, value: Value, microbatch: int, state: StepState) -> Any:
        leaf, parts = state.leaves[value.leaf], self._data * self._microbatches
        return part_of(leaf, value, self._part(microbatch), parts) if parts > 1 else leaf

    def _deliver(
        self, action: Action, values: tuple[Value, ...], outputs: Sequence[Any], state: StepState
    ) -> None:
        key = (action.stage, action.microbatch)
        peers: dict[int, None] = {}
        for value, output in zip(values, outputs, strict=True):
            if value.kind == "saved":
                state.saved.setdefault(key, {})[value.name] = output
            elif value.kind in ("joined", "summed", "same"):
                state.parts.take(value, output)
            elif value.kind == "headed":
                state.headed[value.name] = output
            elif value.kind == "sent":
                peers |= dict.fromkeys(value.peers)
            elif value.kind == "carried":
                state.carried[action.stage, value.name] = output
            elif value.kind == "gradient":
                state.gradients[value.name].append(output)
            elif value.kind == "loss":
                state.losses.append(output)
            elif value.kind == "output":
                state.outputs[value.leaf].append(output)
            elif value.kind == "input_gradient":
                state.inputs[value.leaf] = output
            elif value.kind == "buffer":
                state.buffers[value.name] = output
        for peer in peers:
            tensors = sent_values(values, list(outputs), peer)
            if peer in self._stages:
                state.inbox[(peer, action.microbatch, action.kind)] |= tensors
            else:
                state.outbox[(action.stage, peer, action.microbatch, action.kind)] = tensors

    def _reduce(self, action: Action, state: StepState) -> None:
        """Wait for the gradient all-reduces that the last backward started."""
        for bucket in state.buckets.get(action.stage, ()):
            torch.ops._c10d_functional.wait_tensor(bucket)  # no-op if nothing is pending
        for name, accumulated in state.accumulators.get(action.stage, {}).items():
            state.gradients[name].append(accumulated)
        for group in self._stages[action.stage].reduced:
            flat = state.carried.pop((action.stage, group[0]))
            shapes = [self._held.gradients[name].local_shape for name in group]
            pieces = flat.split([shape.numel() for shape in shapes])
            for name, shape, piece in zip(group, shapes, pieces, strict=True):
                state.gradients[name].append(piece.view(shape))

    def _finish(self, state: StepState) -> StepResult:
        gradients = {}
        for name, parts in state.gradients.items():
            total = parts[0]
            for other in parts[1:]:  # stages on one rank that share a parameter
                total.add_(other)
            gradients[name] = total
        self._sum_shared(gradients)
        self._spread_buffers(state.buffers)
        return StepResult(
            self._loss(state),
            gradients,
            self._gather_outputs(state),
            layouts=self._held.gradients,
        )

    def _spread_buffers(self, new: Mapping[str, torch.Tensor]) -> None:
        """Broadcast new values of buffers to every rank that holds them."""
        for name, maker, places in self._written:
            if self._mesh.pipeline_index not in places:
                continue
            own = self._held.buffers.get(name)
            value = new.get(name)
            if len(places) > 1:
                like = own if value is None else value
                assert like is not None  # a rank in `places` computes the value or holds the buffer
                value = torch.empty_like(like) if value is None else value.contiguous()
                source = self._mesh.rank_of(maker)
                dist.broadcast(value, source, group=self._mesh.shared_groups[places])
            if own is not None and value is not None:
                own.copy_(value)

    def _unscaled(self, result: StepResult, scale: LossScale) -> StepResult:
        """Unscale the gradients, and record whether some rank's overflowed."""
        overflow = unscale(list(result.gradients.values()), scale.factor)
        if self._mesh.world > 1:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._mesh.world_group)
        scale.update(overflow)
        result.overflow = overflow
        return result

    def _sum_shared(self, gradients: dict[str, torch.Tensor]) -> None:
        """All-reduce gradients of parameters that stages of several ranks share, once a step."""
        for name, stages in sorted(self._program.shared.items()):
            places = tuple(sorted({s % self._mesh.pipeline for s in stages}))
            if len(places) > 1 and self._mesh.pipeline_index in places:
                if name not in gradients:
                    if name not in self._reached:  # frozen: no rank has a gradient for it
                        continue
                    gradients[name] = self._zero_gradient(name)
                gradients[name] = gradients[name].contiguous()
                dist.all_reduce(gradients[name], group=self._mesh.shared_groups[places])

    def _zero_gradient(self, name: str) -> torch.Tensor:
        like = self._held.parameters[name]
        layout = self._held.gradients.get(name)
        shape = like.shape if layout is None else layout.local_shape
        return like.new_zeros(shape, device=self._mesh.device)

    def _start_loss(self, state: StepState) -> None:
        """Start the all-reduce of the whole batch's loss over all ranks, overlapped with the
        backwards."""
        like = next(
            (
                node.meta["val"]
                for graph, values in self._program.stages[-1].results
                for node, value in zip(returned(graph), values, strict=True)
                if value.kind == "loss"
            ),
            None,
        )
        if like is None:
            return
        if state.losses:
            partial = self._program.loss_partial
            loss = (
                torch.stack(state.losses).sum()
                if partial and len(state.losses) > 1
                else state.losses[-1]
            )
            if not partial and self._data > 1:
                loss = loss / self._data
        else:
            loss = torch.zeros((), dtype=like.dtype, device=self._mesh.device)
        if not self._alone:
            loss = loss.clone()
            state.summing = dist.all_reduce(loss, group=self._everyone, async_op=True)
        state.loss = loss

    def _loss(self, state: StepState) -> torch.Tensor | None:
        if state.summing is not None:
            state.summing.wait()
        return state.loss

    def _gather_outputs(self, state: StepState) -> dict[int, torch.Tensor]:
        """The model's outputs besides the loss: parts concatenated, on every rank."""
        stages = {
            v.leaf: p.stage
            for p in self._program.stages
            for _, values in p.results
            for v in values
            if v.kind == "output"
        }
        gathered = {}
        for leaf, stage in sorted(stages.items()):
            place = self._program.output_places[leaf]
            parts = state.outputs.get(leaf, [])
            if parts and place == PARTIAL:
                joined = torch.stack(parts).sum(0)
            elif parts and isinstance(place, int) and len(parts) > 1:
                joined = torch.cat(parts, place)
            else:
                joined = parts[-1] if parts else self._empty(stage, leaf, place)
            if self._data > 1 and parts:
                joined = over_data(joined, place, self._mesh)
            elif self._data > 1 and isinstance(place, int):
                shape = list(joined.shape)
                shape[place] *= self._data
                joined = joined.new_empty(shape)
            if self._mesh.pipeline > 1:
                joined = joined.contiguous()
                dist.broadcast(joined, self._mesh.rank_of(stage), group=self._mesh.pipeline_group)
            gathered[leaf] = joined
        return gathered

    def _empty(self, stage: int, leaf: int, place: Any) -> torch.Tensor:
        program = self._program.stages[stage]
        like = next(
            n.meta["val"]
            for graph, values in program.results
            for n, v in zip(returned(graph), values, strict=True)
            if v.kind == "output" and v.leaf == leaf
        )
        shape = list(like.shape)
        if isinstance(place, int):
            shape[place] *= self._microbatches
        return torch.empty(shape, dtype=like.dtype, device=self._mesh.device)

    def _lost(self, done: Action | None, doing: Action | None, error: RuntimeError) -> RankLost:
        lost, waiting = "another rank", "the loss of all ranks"
        if doing is not None and doing.kind in ("send", "receive"):
            lost = f"rank {self._mesh.rank_of(doing.peer)} (stage {doing.peer})"
        if doing is not None:
            waiting = _words(doing)
        return RankLost(
            rank=self._mesh.rank,
            stage=next(iter(self._stages), None) if self._mesh.pipeline > 1 else None,
            lost=self._mesh.other or lost,
            last_action=_words(done) if done is not None else "the step before",
            waiting_for=waiting,
            cause=first_line(error),
        )


def _words(action: Action) -> str:
    if action.kind == "weight":
        return f"weight gradients of microbatch {action.microbatch}, stage {action.stage}"
    if action.kind == "head":
        return f"what needs the whole batch at once, stage {action.stage}"
    if action.kind in ("forward", "backward"):
        return f"{action.kind} of microbatch {action.microbatch}, stage {action.stage}"
    if action.kind == "reduce":
        return f"sum of the gradients of stage {action.stage} over the data axis"
    what = "values" if action.direction == "forward" else "gradients"
    where = "from" if action.kind == "receive" else "to"
    return f"{what} of microbatch {action.microbatch} {where} stage {action.peer}"


def first_line(error: RuntimeError) -> str:
    """The first line of a backend's error message, without the location in its source."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])


def is_connection(error: RuntimeError) -> bool:
    """Whether a backend's error is about another rank, not about this rank's own computation."""
    text = str(error).lower()
    signs = ("connection", "timed out", "timeout", "gloo", "nccl", "peer", "socket", "broken pipe")
    return any(sign in text for sign in signs)


def _axes_needed(program: StepProgram) -> set[str]:
    """The mesh axes, or several joined by "+", that collectives of any stage run over."""
    graphs = [g for p in program.stages for g in p.graphs]
    nodes = [n for g in graphs for n in g.graph.nodes if n.op == "call_function" and n.args]
    return {n.args[-1] for n in nodes if axes_of(n.args[-1])}
