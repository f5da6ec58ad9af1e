"""Runs one step: a loop over this rank's list of actions.

The executor knows nothing of models or plans. It slices the batch, calls stage graphs, keeps the
tensors saved for their backward, sends and receives between stages, and returns the loss and the
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from graphaccel.errors import RankLost
from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.runtime.bind import bind
from graphaccel.runtime.cuda_graphs import ActionWork, Recorder, StepGraphs
from graphaccel.runtime.execution.buckets import Buckets
from graphaccel.runtime.execution.failures import Failures, cause_of
from graphaccel.runtime.execution.lost_rank import (
    described,
    is_connection,
    module_of,
    modules_of,
    values_from,
)
from graphaccel.runtime.execution.messages import Messages, sent_values
from graphaccel.runtime.execution.out_of_memory import is_out_of_memory, out_of_memory
from graphaccel.runtime.execution.parts import Parts, part_of
from graphaccel.runtime.execution.profiled import ModuleRanges
from graphaccel.runtime.execution.results import Results
from graphaccel.runtime.execution.state import Held, StepResult, StepState
from graphaccel.runtime.inductor.compile import StageCompiler
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import Mesh, axes_of
from graphaccel.runtime.tf32 import rounding
from graphaccel.schedule.table import Action, Schedule
from graphaccel.schedule.walk import last_actions, range_name, walk


class Executor:
    """One rank's part of one compiled step.

    program: all stages (peers' too: the shapes of their values are needed). schedule: with
    messages. buckets: those of the session, if all its executors are to use the same memory.
    unsplit: every data rank runs the whole batch (evaluation). compiler: of stages, if any.
    matmul_precision: what float32 matmul inputs are rounded to ("tfloat32"), if anything. recorder:
    of CUDA graphs, where actions are recorded.
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
        unsplit: bool = False,
        compiler: StageCompiler | None = None,
        matmul_precision: str = "",
        recorder: Recorder | None = None,
    ) -> None:
        self._matmul_precision = matmul_precision
        self._buckets = buckets or Buckets()
        self._data, self._data_index = (1, 0) if unsplit else (mesh.data, mesh.data_index)
        mesh.ensure(_axes_needed(program))
        self._program, self._mesh, self._held = program, mesh, held
        self._microbatches = microbatches
        self._actions = schedule[mesh.pipeline_index]
        self._walk = tuple((step, range_name(step)) for step in walk(self._actions))
        self._last_of_stage = last_actions(self._actions)
        heads = [a for a in self._actions if a.kind == "head"]
        self._loss_known = heads or [a for a in self._actions if a.kind == "forward"][-1:]
        self._stages = {
            p.stage: p for p in program.stages if p.stage % mesh.pipeline == mesh.pipeline_index
        }
        self._messages = Messages(program, mesh, microbatches)
        self._failures = Failures(mesh.rank, mesh.world)
        self._ran: tuple[Any, Sequence[Value], int] | None = None
        self._ranges = ModuleRanges()
        self._results = Results(program, mesh, held, microbatches, unsplit=unsplit)
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
        Raises RankLost (GA501) when another rank does not answer, DeviceOutOfMemory (GA502).
        """
        self._failures.forget()
        state = self._begin(leaves)
        if scale is not None:
            graphs, factor = self.graphs, scale.factor
            state.scale = factor.clone() if graphs is None else graphs.fixed("scale", factor)
        current: Action | None = None
        done: Action | None = None
        generator = torch.random.get_rng_state() if state.seed is not None else None
        try:
            for step, name in self._walk:
                done, current = current, step.action
                with record_function(name):
                    self._take(step.verb, step.action, state)
            done, current = current, None
            result = self._results.finish(state)
            if self.graphs is not None:
                self.graphs.end()
            return result if scale is None else self._results.unscaled(result, scale)
        except Exception as error:
            memory = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if not memory and self._mesh.world > 1 and isinstance(error, RuntimeError):
                if is_connection(error):
                    raise self._rank_lost(done, current, error, state) from error
            self._failures.publish(error)
            if memory:
                raise out_of_memory(current, self._mesh.device) from error
            raise
        finally:
            if generator is not None:
                torch.random.set_rng_state(generator)

    def _take(self, verb: str, action: Action, state: StepState) -> None:
        """Take one step of the schedule's walk (`schedule.walk`)."""
        if verb == "post":
            self._messages.post(action)
        elif verb == "wait":
            received = self._messages.wait(action)
            state.inbox[action.stage, action.microbatch, action.direction] |= received
        elif verb == "run":
            self.run_action(action, state)
        elif verb == "send":
            key = (action.stage, action.peer, action.microbatch, action.direction)
            self._messages.send(action, state.outbox.pop(key))
        elif verb == "release":
            self._messages.release(action)
        else:
            self._reduce(action, state)

    def _begin(self, leaves: Sequence[Any]) -> StepState:
        self._ran = None
        state = StepState([self._on_device(i, leaf) for i, leaf in enumerate(leaves)], {})
        state.parts = Parts(self._data * self._microbatches)
        prologue = self._program.prologue
        if prologue is not None:
            inputs = [self._prologue_input(v, state) for v in prologue.inputs]
            state.prologue = dict(zip(prologue.outputs, prologue.graph(inputs), strict=True))
        if self.graphs is not None:
            self._allocate_buckets(state)
            self._begin_graphs(self.graphs, state)
            self._prepare(state)
        else:
            self._prepare(state)
            self._allocate_buckets(state)
        if self._program.random and not self._draws_as_one_device():
            # One draw per step from the generator that all ranks share; each part of the batch has
            # a random stream of its own.
            state.seed = int(torch.randint(2**62, ()).item())
        return state

    def _draws_as_one_device(self) -> bool:
        """Whether every rank draws what one device does: all rows, in one stage, from the generator
        of the CPU, whose state all ranks share."""
        if self._mesh.world == 1:
            return self._microbatches == 1
        whole = self._data * self._microbatches == 1 and self._mesh.pipeline == 1
        return whole and self._mesh.device.type == "cpu"

    def _on_device(self, place: int, leaf: Any) -> Any:
        """A leaf of the batch on this rank's device, contiguous."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.graphs is not None:
            return self.graphs.fixed(("batch", place), leaf)
        return leaf.contiguous().to(self._mesh.device)

    def _begin_graphs(self, graphs: StepGraphs, state: StepState) -> None:
        held, inner = self._held, state.accumulators.values()
        stored = (held.parameters, held.buffers, held.constants, held.shards, *inner)
        fixed = [t for tensors in stored for t in tensors.values()]
        graphs.begin(fixed, [x for x in state.leaves if not isinstance(x, torch.Tensor)])
        state.prologue = {n: graphs.fixed(("prologue", n), t) for n, t in state.prologue.items()}

    def _prepare(self, state: StepState) -> None:
        """Start the all-gathers of parameters that are held for all microbatches."""
        for number, stage in self._stages.items():
            if stage.prepare is not None:
                inputs = [self._stored(v) for v in stage.prepare_inputs]
                names = (v.name for v in stage.prepare_outputs)
                values, results = stage.prepare_inputs, stage.prepare_outputs
                action = "prepare", number, 0
                work = ActionWork(action, stage.prepare, inputs, values, results)
                try:
                    gathered = self._run_graph(work)
                except RuntimeError as error:
                    if self._mesh.world == 1 or not is_connection(error):
                        raise
                    state.awaited = "parameters of which each rank holds a part", ()
                    raise self._rank_lost(None, None, error, state) from error
                state.held[number] = dict(zip(names, gathered, strict=True))

    def _run_graph(self, work: ActionWork) -> Sequence[Any]:
        """The outputs of a graph."""
        self._ran = work.graph, work.values, work.action[1]
        if self.graphs is None or not self.graphs.records(work.action[1]):
            return self._ranges.of(work.graph)(work.inputs)
        return self.graphs.run(work)

    def _stored(self, value: Value) -> torch.Tensor:
        held = self._held.shards if value.kind == "shards" else self._held.parameters
        return held[value.name]

    def _allocate_buckets(self, state: StepState) -> None:
        """Allocate the buckets that gradients are accumulated in."""
        for number, stage in self._stages.items():
            if stage.buckets:
                buckets = self._buckets.of(stage, self._mesh.device)
                state.accumulators[number], state.buckets[number] = buckets

    def _prologue_input(self, value: Value, state: StepState) -> Any:
        if value.kind == "batch":
            return state.leaves[value.leaf]
        held = self._held.buffers if value.kind == "buffer" else self._held.constants
        return held[value.name]

    def run_action(self, action: Action, state: StepState) -> None:
        """Run the graph of one forward, backward, weight or head action."""
        stage = self._stages[action.stage]
        if state.seed is not None:
            torch.manual_seed(
                (state.seed + 7919 * self._random_stream(action) + action.stage) % 2**63
            )
        first, last = action.microbatch == 0, action.microbatch == self._microbatches - 1
        graph, values, results = stage.phase(action.kind, first, last)
        saved: dict[str, Any] = {}
        if action.kind not in ("forward", "head"):
            saved = state.saved.pop((action.stage, action.microbatch), {})
        box = state.inbox.pop((action.stage, action.microbatch, action.kind), {})
        inputs = [self._read(v, action, state, saved, box) for v in values]
        saved.clear()
        box.clear()
        key = action.kind, action.stage, action.microbatch
        with rounding(self._matmul_precision):
            outputs = self._run_graph(ActionWork(key, graph, inputs, values, results))
        if action in self._last_of_stage:
            state.held.pop(action.stage, None)
            if self._stages[action.stage].head is not None:
                state.headed.clear()
        self._store_outputs(action, results, outputs, state)
        if action in self._loss_known:
            self._results.start_loss(state)

    def _part(self, microbatch: int) -> int:
        return self._data_index * self._microbatches + microbatch

    def _random_stream(self, action: Action) -> int:
        """Index of the random stream: one per part of the batch, and one for what runs on all of
        it."""
        if action.kind == "head":
            return self._data * self._microbatches
        return self._part(action.microbatch)

    def _read(
        self,
        value: Value,
        action: Action,
        state: StepState,
        saved: dict[str, Any],
        box: dict[str, Any],
    ) -> Any:
        kind = value.kind
        if kind in ("parameter", "shards"):
            return self._stored(value)
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
            values = state.prologue if kind == "prologue" else state.headed
            part = self._part(action.microbatch)
            return part_of(values[value.name], value, part, self._data * self._microbatches)
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

    def _store_outputs(
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
        names = self._stages[action.stage].buckets
        for bucket, of in zip(state.buckets.get(action.stage, ()), names, strict=False):
            state.awaited = "", of
            torch.ops._c10d_functional.wait_tensor(bucket)  # no-op if nothing is pending
        for name, accumulated in state.accumulators.get(action.stage, {}).items():
            state.gradients[name].append(accumulated)
        for group in self._stages[action.stage].reduced:
            flat = state.carried.pop((action.stage, group[0]))
            shapes = [self._held.gradients[name].local_shape for name in group]
            pieces = flat.split([shape.numel() for shape in shapes])
            for name, shape, piece in zip(group, shapes, pieces, strict=True):
                state.gradients[name].append(piece.view(shape))

    def _rank_lost(
        self, done: Action | None, current: Action | None, error: RuntimeError, state: StepState
    ) -> RankLost:
        lost, (waiting, names) = "another rank", state.awaited
        module = ""
        if (ran := self._ran) is not None:
            graph, values, stage = ran
            module = module_of(error, graph, values, self._stages[stage].buckets)
        if current is not None:
            if current.kind in ("send", "receive"):
                lost = f"rank {self._mesh.rank_of(current.peer)} (stage {current.peer})"
            waiting = described(current)
            module = module or values_from(self._program, current)
        if current is None or current.kind == "reduce":
            module = module or modules_of(names)
        return RankLost(
            rank=self._mesh.rank,
            stage=next(iter(self._stages), None) if self._mesh.pipeline > 1 else None,
            lost=self._mesh.other or lost,
            last_action=described(done) if done is not None else "the step before",
            waiting_for=waiting,
            cause=cause_of(error),
            module=module,
        )


def _axes_needed(program: StepProgram) -> set[str]:
    """The mesh axes, or several joined by "+", that collectives of any stage run over."""
    graphs = [g for p in program.stages for g in p.graphs]
    nodes = [n for g in graphs for n in g.graph.nodes if n.op == "call_function" and n.args]
    return {n.args[-1] for n in nodes if axes_of(n.args[-1])}
