"""Training where the script computes the loss from the model's outputs.

The forward runs when the model is called. Its outputs are gathered to every rank, so that the
script's loss is that of the whole batch on each. When the loss is differentiated, each rank takes
its own part of the gradients that reach the outputs, runs the backward, and hands out gradients
summed over the data axis. A call holds what its backward reads for as long as its outputs live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphaccel.compat.torch.autograd import retains_graph
from graphaccel.compat.torch.tensors import version
from graphaccel.errors import GraphMisuse, RetainGraph
from graphaccel.ir.program import StageProgram, StepProgram
from graphaccel.kernels.host_copy import TO_HOST, wait
from graphaccel.runtime.bind import bind
from graphaccel.runtime.execution.buckets import Buckets
from graphaccel.runtime.execution.executor import Executor
from graphaccel.runtime.execution.lost_rank import is_connection
from graphaccel.runtime.execution.parts import over_data, own_part
from graphaccel.runtime.execution.state import Held, StepState
from graphaccel.runtime.inductor.compile import StageCompiler
from graphaccel.runtime.mesh import Mesh
from graphaccel.schedule.table import Action

_FORWARD, _BACKWARD, _REDUCE = (Action(k, 0, 0) for k in ("forward", "backward", "reduce"))
Backward = Callable[[frozenset[int]], StageProgram]


@dataclass
class ForwardCall:
    """One call of the model, and the tensors that its backward will read.

    outputs: by leaf of what the model returned, whole batch; removed when they are handed out.
    versions: the version counter of each tensor that the backward reads, by a description of it.
    """

    outputs: dict[int, torch.Tensor]
    state: StepState | None
    versions: Mapping[str, tuple[torch.Tensor, int]] = field(default_factory=dict, repr=False)


class ExternalLossExecutor(Executor):
    """One rank's part of a step whose loss the script computes: one stage, one microbatch.

    backward: returns the stage with the backward of a loss that reads only some output leaves.
    agree: called before each backward, in which all ranks take part.
    """

    def __init__(
        self,
        program: StepProgram,
        mesh: Mesh,
        held: Held,
        backward: Backward,
        buckets: Buckets,
        agree: Callable[[], object],
        compiler: StageCompiler | None = None,
        matmul_precision: str = "",
    ) -> None:
        super().__init__(
            program,
            ((),),
            mesh,
            held,
            1,
            buckets=buckets,
            compiler=compiler,
            matmul_precision=matmul_precision,
        )
        self._backward_of, self._agree = backward, agree
        self._variants: dict[frozenset[int], StageProgram] = {}
        (self._stage,) = program.stages

    def forward(self, leaves: Sequence[Any]) -> ForwardCall:
        """Run the forward on the leaves of the whole batch, and write its buffer updates.

        Raises RankLost (GA501) when another rank does not answer.
        """
        state = self._begin(leaves)
        with self._running(state, _FORWARD):
            self.run_action(_FORWARD, state)
            outputs = self._gathered(state)
        self._write_buffers(state)
        if not self._program.tangents:
            return ForwardCall(outputs, None)
        read = {v.leaf for v in self._stage.backward_inputs if v.kind == "batch"}
        state.leaves = [leaf if i in read else None for i, leaf in enumerate(state.leaves)]
        return ForwardCall(outputs, state, self._versions(state))

    def backward(
        self, call: ForwardCall, tangents: Mapping[int, torch.Tensor], *, keep: bool
    ) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """Gradients by parameter name, and by batch leaf for those that require one.

        tangents: gradients of the output leaves that the loss reads, for the whole batch. keep:
        another backward of this call may follow.
        Raises RetainGraph (GA402) where none may, GraphMisuse (GA407) after in-place writes.
        """
        if call.state is None:
            raise RetainGraph(kind="freed")
        _check_versions(call.versions)
        self._agree()
        state = replace(call.state, gradients=StepState([], {}).gradients, inputs={})
        saved = state.saved.get((0, 0), {})
        state.saved = {(0, 0): dict(saved)}
        if not keep:
            saved.clear()
            call.state, call.versions = None, {}
        stage = self._variant(frozenset(tangents))
        state.accumulators, state.buckets = {}, {}
        if stage.buckets:
            state.accumulators[0], state.buckets[0] = self._buckets.of(stage, self._mesh.device)
        state.tangents = self._parts(stage, tangents)
        whole, self._stages = self._stages, {0: stage}
        try:
            with self._running(state, _BACKWARD):
                self.run_action(_BACKWARD, state)
                self._reduce(_REDUCE, state)
                inputs = self._input_gradients(state)
        finally:
            self._stages = whole
        return {name: parts[0] for name, parts in state.gradients.items()}, inputs

    def _compiled(self, stage: StageProgram) -> StageProgram:
        assert self._compiler is not None
        return self._compiler.stage(stage, ("forward",))

    def _allocate_buckets(self, state: StepState) -> None:
        """No gradient buckets are allocated before a backward runs."""

    def _variant(self, used: frozenset[int]) -> StageProgram:
        if used not in self._variants:
            built = self._backward_of(used)
            for graph in built.backwards.values():
                bind(graph, self._mesh)
            if self._compiler is not None:
                built = self._compiler.stage(built, ("backward",))
            self._variants[used] = built
        return self._variants[used]

    @contextmanager
    def _running(self, state: StepState, action: Action) -> Iterator[None]:
        """Keep the generator's state after this call's seed was drawn, and name a lost rank in
        errors."""
        generator = torch.random.get_rng_state() if state.seed is not None else None
        self._failures.forget()
        try:
            yield
        except Exception as error:
            if isinstance(error, RuntimeError) and is_connection(error) and self._mesh.world > 1:
                raise self._rank_lost(None, action, error, state) from error
            self._failures.publish(error)
            raise
        finally:
            if generator is not None:
                torch.random.set_rng_state(generator)

    def _gathered(self, state: StepState) -> dict[int, torch.Tensor]:
        """Outputs of the whole batch; a rank's own part is freed once it is gathered."""
        gathered = {}
        for leaf in sorted(state.outputs):
            (part,) = state.outputs.pop(leaf)
            place = self._program.output_places[leaf]
            gathered[leaf] = over_data(part, place, self._mesh) if self._mesh.data > 1 else part
        return gathered

    def _write_buffers(self, state: StepState) -> None:
        """Write new buffer values once per call, before the script sees its outputs; the backward
        reads the old values."""
        read = {v.name for v in self._stage.backward_inputs if v.kind == "buffer"}
        for name, new in state.buffers.items():
            buffer = self._held.buffers[name]
            if name in read:
                state.before[name] = buffer.clone()
            buffer.copy_(new)
        state.buffers = {}

    def _versions(self, state: StepState) -> dict[str, tuple[torch.Tensor, int]]:
        results: dict[str, torch.Tensor] = {}
        for value in self._stage.backward_inputs:
            if value.kind == "parameter":
                results[f"parameter `{value.name}`"] = self._held.parameters[value.name]
            elif value.kind == "buffer" and value.name not in state.before:
                results[f"buffer `{value.name}`"] = self._held.buffers[value.name]
            elif value.kind == "batch" and isinstance(state.leaves[value.leaf], torch.Tensor):
                results[f"input {value.name or value.leaf}"] = state.leaves[value.leaf]
        for name, tensor in state.saved.get((0, 0), {}).items():
            if isinstance(tensor, torch.Tensor):
                results[f"the model's value {name}"] = tensor
        return {name: (tensor, version(tensor)) for name, tensor in results.items()}

    def _parts(
        self, stage: StageProgram, tangents: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """This rank's part of each gradient, in the layout that the graph expects."""
        nodes = [n for n in stage.backwards[(True, True)].graph.nodes if n.op == "placeholder"]
        parts = {}
        for node, value in zip(nodes, stage.backward_inputs, strict=True):
            if value.kind != "tangent":
                continue
            part, like = tangents[value.leaf].detach(), node.meta["val"]
            part = own_part(part, self._program.output_places[value.leaf], self._mesh)
            if part.stride() != like.stride():
                laid = torch.empty_strided(
                    part.shape, like.stride(), dtype=part.dtype, device=part.device
                )
                part = laid.copy_(part)
            parts[value.leaf] = part
        return parts

    def _input_gradients(self, state: StepState) -> dict[int, torch.Tensor]:
        if self._mesh.data == 1:
            return state.inputs
        places = self._program.input_places
        return {
            leaf: over_data(part, places[leaf], self._mesh) for leaf, part in state.inputs.items()
        }


def _check_versions(versions: Mapping[str, tuple[torch.Tensor, int]]) -> None:
    """Raise for in-place writes to saved tensors, as autograd does in eager mode."""
    for what, (tensor, before) in versions.items():
        if version(tensor) != before:
            raise GraphMisuse(
                what=f"{what} was changed in place between the forward that read it and its "
                "backward",
                help_line="call loss.backward() before optimizer.step(), and make a copy of what "
                "is changed:  x = x.clone()",
            )


class HandIn(torch.autograd.Function):
    """The outputs of a call, whose backward runs the model's backward."""

    @staticmethod
    def forward(
        ctx: Any,
        executor: ExternalLossExecutor,
        call: ForwardCall,
        tracked: frozenset[int],
        offloaded: bool,
        names: tuple[str, ...],
        leaves: tuple[int, ...],
        *inputs: torch.Tensor,
    ) -> Any:
        """The outputs in the order of their leaves.

        tracked: output leaves that require a gradient. offloaded: parameters are on the host,
        and get their gradients there. inputs: parameters that may get a gradient, called `names`,
        then the batch leaves that require one.
        """
        ctx.executor, ctx.call, ctx.names, ctx.input_leaves = executor, call, names, leaves
        ctx.away = offloaded
        ctx.output_leaves = tuple(call.outputs)
        # New tensor objects: the call's own would be in a reference cycle with the call.
        outputs = tuple(call.outputs.pop(leaf).detach() for leaf in ctx.output_leaves)
        ctx.mark_non_differentiable(
            *(o for o, i in zip(outputs, ctx.output_leaves, strict=True) if i not in tracked)
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        """The gradients of the parameters and of the batch leaves."""
        if torch.is_grad_enabled():  # enabled here: create_graph=True
            raise RetainGraph(kind="create_graph")
        tangents = {
            leaf: gradient
            for leaf, gradient in zip(ctx.output_leaves, gradients, strict=True)
            if gradient is not None
        }
        result, inputs = ctx.executor.backward(ctx.call, tangents, keep=retains_graph())
        handed = [result.pop(name, None) for name in ctx.names]
        if ctx.away and tangents:
            handed = [None if own is None else TO_HOST(own) for own in handed]
            wait(next(iter(tangents.values())).device)
        handed += [inputs.pop(leaf, None) for leaf in ctx.input_leaves]
        return (None, None, None, None, None, None, *handed)
