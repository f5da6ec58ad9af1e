"""State of a planned model on this rank: parameters, compiled steps, memory between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch.modules import clear_flat_weight_refs
from graphaccel.compat.torch.tensors import reregister_hooks
from graphaccel.errors import GraphMisuse
from graphaccel.ir.program import Sharded, StageProgram, StepProgram
from graphaccel.kernels.host_copy import on_host, wait
from graphaccel.runtime.cuda_graphs import Recorder
from graphaccel.runtime.execution.buckets import Buckets
from graphaccel.runtime.execution.executor import Executor
from graphaccel.runtime.execution.external_loss import ExternalLossExecutor, HandIn
from graphaccel.runtime.execution.state import Held, StepResult
from graphaccel.runtime.host_memory.reuse import keep_pages
from graphaccel.runtime.inductor.compile import StageCompiler
from graphaccel.runtime.init_tape import InitTape
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.optimizer_copy import leave_values
from graphaccel.runtime.parameters.remote import Elsewhere, RemoteTensor
from graphaccel.runtime.parameters.remote_buffers import RemoteBuffers
from graphaccel.runtime.parameters.sharded import ShardTensor, local_of
from graphaccel.runtime.parameters.swap import forget_graphs, swap
from graphaccel.schedule.table import Schedule


@dataclass(frozen=True)
class CompiledStep:
    """One step for one batch shape.

    leaves: turns a call's (args, kwargs) into batch leaves. rebuild: turns the loss and the other
    outputs into what the user's model returns. backward: of a loss that the script computes from
    some of the output leaves; None where the model computes the loss. compiler: of stages, where
    the plan compiles them.
    """

    program: StepProgram
    schedule: Schedule = field(repr=False)
    microbatches: int
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    rebuild: Callable[[torch.Tensor | None, Mapping[int, torch.Tensor]], Any] = field(repr=False)
    backward: Callable[[frozenset[int]], StageProgram] | None = field(default=None, repr=False)
    compiler: StageCompiler | None = field(default=None, repr=False)

    @cached_property
    def reached(self) -> frozenset[str]:
        """Parameters that get a gradient, on this rank or a peer."""
        return self.program.reached


class Session:
    """Owns what a rank keeps between steps."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        scale: LossScale | None,
        matmul_precision: str = "",
        recorder: Recorder | None = None,
        *,
        offloaded: bool = False,
    ) -> None:
        """matmul_precision: `planner.plan.plan.Precision.matmul`. recorder: of training steps.
        offloaded: parameters are on the host, and their gradients are handed out there."""
        self.model, self.mesh, self.scale, self.away = model, mesh, scale, offloaded
        self._matmul_precision, self._recorder = matmul_precision, recorder
        self.optimizer: Any = None
        self.homes: dict[str, tuple[int, ...]] = {}
        self.groups: tuple[tuple[str, ...], ...] = ()
        self.splits: Mapping[str, tuple[Sharded, ...]] = {}
        self.parameters: dict[str, ShardLayout] = {}
        self.gradients: dict[str, ShardLayout] = {}
        self.states: dict[str, ShardLayout] = {}
        self._shards: dict[str, torch.Tensor] = {}
        self._executors: dict[int, Executor] = {}
        self._initial: InitTape | None = None
        self._buckets = Buckets(1 if recorder is None else 2)
        self._outside: dict[int, ExternalLossExecutor] = {}
        self._places: dict[str, tuple[bool, int]] = {}
        self._buffers = RemoteBuffers()

    def settle(
        self,
        homes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        optimizer: Any,
        program: StepProgram,
        initial: InitTape | None = None,
    ) -> None:
        """Free what this rank does not hold: parameters and buffers of other stages become
        RemoteTensors in place, those that are stored sharded become ShardTensors.

        initial: how to initialise a model on the meta device; each tensor is computed where it will
        be stored, one at a time.

        Parameter objects keep their identity: optimizers, groups and schedulers stay valid.
        """
        self._initial, self.optimizer = initial, optimizer
        if self.mesh.device.type == "cpu":
            keep_pages()
        clear_flat_weight_refs(self.model)
        forget_graphs(self.model)
        self.homes = dict(homes) | {name: homes[of] for name, of in tied.items() if of in homes}
        if self.mesh.pipeline > 1:
            self._leave_remote(optimizer)
        self._fill_buffers()
        self._shard(program, optimizer)
        self._fill_parameters()
        self._bring(optimizer)
        self._initial = None

    def _leave_remote(self, optimizer: Any) -> None:
        own = (self._holders(name) for name, _ in self.model.named_parameters())
        shared = Counter(
            c for holders in own if self.mesh.pipeline_index in holders for c in holders
        )
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not self.holds(name) and not isinstance(parameter, RemoteTensor):
                _make_remote(parameter, self.mesh, self._elsewhere(name, shared))
                if optimizer is not None:
                    leave_values(optimizer, parameter)
        self._buffers.leave(
            self.model,
            lambda n: self._elsewhere(n, shared) if n in self.homes and not self.holds(n) else None,
            self.mesh.device,
        )

    def _elsewhere(self, name: str, shared: Mapping[int, int]) -> Elsewhere:
        return Elsewhere(self.mesh.pipeline_group, self._holders(name), shared)

    def _holders(self, name: str) -> frozenset[int]:
        """The pipeline coordinates that hold a parameter or buffer."""
        every = range(self.mesh.pipeline)
        stages = self.homes.get(name)
        return frozenset(every if stages is None else (s % self.mesh.pipeline for s in stages))

    def _fill_buffers(self) -> None:
        """Move buffers to this rank's device; initialise them where the model was on the meta
        device."""
        filled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for prefix, module in self.model.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is None or buffer.device == self.mesh.device:
                    continue
                if id(buffer) not in filled:
                    full = f"{prefix}.{name}" if prefix else name
                    value = self.value_of(full, buffer).to(self.mesh.device)
                    filled[id(buffer)] = (buffer, value)
                module._buffers[name] = filled[id(buffer)][1]

    def _fill_parameters(self) -> None:
        """Initialise full parameters of this rank, of a model that was on the meta device."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                value = self._stored_here(self.value_of(name, parameter))
                built = nn.Parameter(value, requires_grad=parameter.requires_grad)
                vars(built).update(vars(parameter))
                torch.utils.swap_tensors(parameter, built)
                reregister_hooks(parameter)

    def value_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer in full: as it is, or initialised now."""
        if not tensor.is_meta:
            return tensor.detach()
        assert self._initial is not None
        return self._initial.value(name).to(self.mesh.device)

    def _stored_here(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor that belongs to a parameter, moved to where parameters are stored."""
        device = self.mesh.device
        return on_host(value, device) if self.away else value.to(device)

    def _room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for `count` elements where parameters are stored."""
        device = self.mesh.device
        if not self.away:
            return torch.empty(count, dtype=dtype, device=device)
        return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")

    def _bring(self, optimizer: Any = None) -> None:
        """Move parameters, and what belongs to them, to where they are stored."""
        for name, parameter in self.model.named_parameters():
            if not self.holds(name):
                continue
            if not isinstance(parameter, ShardTensor):
                here = parameter.data
                there = self._stored_here(here)
                if there is not here:
                    gradient, parameter.grad = parameter.grad, None
                    parameter.data = there
                    parameter.grad = None if gradient is None else self._stored_here(gradient)
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (self.away or value.dim()):
                    state[key] = self._stored_here(value)

    def _shard(self, program: StepProgram, optimizer: Any) -> None:
        """Move parameters that are stored sharded into the flat buffers of their groups."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        self.groups, self.splits = program.groups, program.parameter_shards
        held = {n: p for n, p in own.items() if self.holds(n)}
        for name, parameter in held.items():
            for splits, layouts in (
                (program.parameter_shards.get(name, ()), self.parameters),
                (program.gradient_splits(name), self.gradients),
                (program.state_splits(name), self.states),
            ):
                if splits:
                    layouts[name] = ShardLayout(parameter.shape, splits, self.mesh)
        self.mesh.ensure(sorted(all_axes(program, self.mesh)))
        shards: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for group in self.groups:
                if group[0] in held:
                    layouts = [self.parameters[n] for n in group]
                    sizes = [layout.local_shape.numel() for layout in layouts]
                    like = held[group[0]]
                    flat = self._shards[group[0]] = self._room(sum(sizes), like.dtype)
                    parts = flat.split(sizes)
                    for name, part, layout in zip(group, parts, layouts, strict=True):
                        shards[name] = part.view(layout.local_shape)
                        shards[name].copy_(layout.own(self.value_of(name, held[name])))
            for name, layout in self.parameters.items():
                if name not in shards:
                    shards[name] = self._stored_here(
                        layout.own(self.value_of(name, held[name])).clone()
                    )
        done: set[int] = set()
        for name, layout in self.states.items():
            _shard_state(held[name], layout, optimizer)
        for name, layout in self.parameters.items():
            if id(held[name]) not in done:
                done.add(id(held[name]))
                _make_sharded(held[name], shards[name], layout)

    def step_layouts(self) -> dict[str, ShardLayout]:
        """Layouts of the optimizer state of every trained parameter here, by one of its names."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        sharded = {id(own[n]) for n in self.states}
        whole = {
            n: ShardLayout(p.shape, (), self.mesh)
            for n, p in own.items()
            if p.requires_grad and self.holds(n) and id(p) not in sharded
        }
        return {**whole, **self.states}

    def holds(self, name: str) -> bool:
        """Whether a stage on this rank has the parameter or buffer."""
        return self.mesh.pipeline_index in self._holders(name)

    def owner(self, name: str) -> int:
        """The pipeline coordinate that owns a parameter or buffer."""
        stages = self.homes.get(name)
        return 0 if stages is None else stages[0] % self.mesh.pipeline

    def held(self, constants: Mapping[str, torch.Tensor]) -> Held:
        """The tensors that graphs read by name."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        parameters = {n: p for n, p in parameters.items() if self.holds(n)}
        # A frozen parameter that the forward updates is a buffer in the graph.
        frozen = {n: local_of(p.detach()) for n, p in parameters.items() if not p.requires_grad}
        buffers = self.model.named_buffers(remove_duplicate=False)
        return Held(
            {n: local_of(p.detach()) for n, p in parameters.items()},
            frozen | {n: b for n, b in buffers if self.holds(n)},
            {n: c.to(self.mesh.device) for n, c in constants.items()},
            self._shards,
            self.gradients,
        )

    def fill(self, compiled: CompiledStep, name: str, values: torch.Tensor) -> None:
        """Replace a constant's values, also in the copies that executors' graphs already read."""
        with torch.no_grad():
            compiled.constants[name].copy_(values)
            for executors in (self._executors, self._outside):
                executor = executors.get(id(compiled))
                if executor is not None:
                    executor.constants[name].copy_(values)

    def forget(self, compiled: CompiledStep) -> None:
        """Free what runs a step that will not run again."""
        self._executors.pop(id(compiled), None)
        self._outside.pop(id(compiled), None)

    def follow(self) -> None:
        """Use a tensor that the script put in the place of a parameter's or buffer's (`p.data = x`,
        `load_state_dict(assign=True)`).

        Raises GraphMisuse (GA407) where this rank did not hold the full original.
        """
        self._buffers.leave_replaced()
        tensors = *self.model.named_parameters(), *self.model.named_buffers()
        places: dict[str, tuple[bool, int]] = {}  # whether it is held in full, and where
        for name, tensor in tensors:
            if isinstance(tensor, RemoteTensor):
                places[name] = False, 0
            elif isinstance(tensor, ShardTensor):
                places[name] = False, id(tensor)
            else:
                places[name] = True, tensor.data_ptr()
        if self._places and places != self._places:
            for name, place in places.items():
                before = self._places.get(name, place)
                if not before[0] and before != place:
                    raise GraphMisuse(
                        what=f"`{name}` was replaced, and this rank held only a part of it or none",
                        help_line="copy values into it:  model.load_state_dict(state)",
                    )
            self._executors.clear()
            self._outside.clear()
            if self.away:
                self._bring()
        self._places = places

    def step(self, compiled: CompiledStep, leaves: Sequence[Any]) -> StepResult:
        """Run one training or evaluation step on the leaves of the global batch."""
        return self._ran(self._executor(compiled, unsplit=False).run(leaves, self.scale))

    def call(
        self,
        compiled: CompiledStep,
        leaves: Sequence[Any],
        tracked: frozenset[int],
        parameters: Sequence[tuple[str, torch.Tensor]],
        agree: Callable[[], object],
    ) -> dict[int, torch.Tensor]:
        """The forward of a step whose loss the script computes: outputs by leaf, whole batch.

        tracked: those that require a gradient. parameters: those that may get one, with names.
        agree: called before each backward.
        """
        executor = self._outside.get(id(compiled))
        if executor is None:
            executor = self._outside[id(compiled)] = self._outside_executor(
                compiled, self._buckets, agree
            )
        with torch.no_grad():
            built = executor.forward(leaves)
        order = tuple(built.outputs)
        wanting = [
            i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        outputs = HandIn.apply(
            executor,
            built,
            tracked,
            self.away,
            tuple(name for name, _ in parameters),
            tuple(wanting),
            *(p for _, p in parameters),
            *(leaves[i] for i in wanting),
        )
        return dict(zip(order, outputs, strict=True))

    def _outside_executor(
        self, compiled: CompiledStep, buckets: Buckets, agree: Callable[[], object]
    ) -> ExternalLossExecutor:
        assert compiled.backward is not None
        held = self.held(compiled.constants)
        return ExternalLossExecutor(
            compiled.program, self.mesh, held, compiled.backward, buckets,
            agree, compiled.compiler, self._matmul_precision,
        )  # fmt: skip

    def apart(self, compiled: CompiledStep) -> Executor:
        """An executor of a training step with its own gradient buckets and no CUDA graphs."""
        if compiled.backward is not None:
            return self._outside_executor(compiled, Buckets(), lambda: None)
        return Executor(
            compiled.program,
            compiled.schedule,
            self.mesh,
            self.held(compiled.constants),
            compiled.microbatches,
            compiler=compiled.compiler,
            matmul_precision=self._matmul_precision,
        )

    def evaluate(self, compiled: CompiledStep, leaves: Sequence[Any]) -> StepResult:
        """A forward of the whole batch, the same on every data rank."""
        return self._ran(self._executor(compiled, unsplit=True).run(leaves))

    def _ran(self, result: StepResult) -> StepResult:
        """Wait, where parameters are on the host, for the device's copies of them: the script may
        write to them after this."""
        if self.away:
            wait(self.mesh.device)
        return result

    def _executor(self, compiled: CompiledStep, *, unsplit: bool) -> Executor:
        executor = self._executors.get(id(compiled))
        if executor is None:
            executor = self._executors[id(compiled)] = Executor(
                compiled.program,
                compiled.schedule,
                self.mesh,
                self.held(compiled.constants),
                1 if unsplit else compiled.microbatches,
                buckets=self._buckets,
                unsplit=unsplit,
                compiler=compiled.compiler,
                matmul_precision=self._matmul_precision,
                recorder=None if unsplit else self._recorder,
            )
        return executor


def _make_remote(parameter: nn.Parameter, mesh: Mesh, where: Elsewhere) -> None:
    remote: Any = nn.Parameter(
        RemoteTensor(parameter.detach(), where, mesh.device), requires_grad=parameter.requires_grad
    )
    remote.elsewhere = where
    swap(parameter, remote, lambda g: RemoteTensor(g, where, mesh.device))


def _make_sharded(parameter: nn.Parameter, local: torch.Tensor, layout: ShardLayout) -> None:
    sharded = nn.Parameter(ShardTensor(local, layout), requires_grad=parameter.requires_grad)
    sharded.local, sharded.sharding = local, layout  # type: ignore[attr-defined]
    swap(parameter, sharded, lambda g: ShardTensor(layout.own(g).clone().to(local.device), layout))
    reregister_hooks(parameter)


def _shard_state(parameter: nn.Parameter, layout: ShardLayout, optimizer: Any) -> None:
    """Keep this rank's shard of optimizer state from steps before the plan."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == layout.shape and value.dim():
            state[key] = layout.own(value).clone()


def all_axes(program: StepProgram, mesh: Mesh) -> set[str]:
    """The axes, joined by "+", that something in any stage is sharded over."""
    names = {*program.parameter_shards, *program.owned}
    splits = [f(n) for n in names for f in (program.gradient_splits, program.state_splits)]
    splits += [program.parameter_shards.get(n, ()) for n in names]
    sets = [{s.axis for s in match} for match in splits]
    return {mesh.joined(match) for match in sets if match}
