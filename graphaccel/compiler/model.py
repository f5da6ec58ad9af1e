"""The object of planning: a model, its loss function and its optimizer's state, in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphaccel.capture.batch import Batch, as_call, flatten_call
from graphaccel.capture.batch_dims import BatchDims
from graphaccel.capture.export.export import LossFn
from graphaccel.capture.state.caches import restore_buffers
from graphaccel.capture.state.closures import copied, held_by_module, memory_of
from graphaccel.compat.torch.fakes import FakeTensor, FakeTensorMode
from graphaccel.compiler.probe_optimizer import optimizer_memory_of, tried_step
from graphaccel.errors import Unsupported
from graphaccel.guards.attributes import follow_values, values_on
from graphaccel.guards.places import STRUCTURE
from graphaccel.ir.program import Sharded, StepProgram
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory, step_bytes
from graphaccel.planner.memory.resident import Resident
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.zero import local_shape
from graphaccel.runtime.deferred import RECORD
from graphaccel.runtime.parameters.remote import RemoteTensor


@dataclass(frozen=True)
class Model:
    """A module, its loss function, the bytes of optimizer state for each byte of trained parameter,
    and the bytes of its parameters and buffers by name. shardable: its optimizer can work on
    shards. step_memory: memory that the optimizer's step allocates. batch_dims: the batch dims of
    the inputs, where given."""

    module: nn.Module = field(repr=False)
    loss_fn: LossFn | None
    optimizer_bytes: float
    shardable: bool = True
    step_memory: OptimizerMemory = NOTHING
    batch_dims: BatchDims = None

    def resident(self, batch: Batch, plan: Plan, program: StepProgram) -> Resident:
        """Bytes that a rank holds the whole time."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))

        def share(name: str, splits: tuple[Sharded, ...]) -> int:
            parameter = parameters[name]
            return prod(local_shape(parameter.shape, splits, plan)) * parameter.element_size()

        held_bytes = {n: share(n, program.parameter_shards.get(n, ())) for n in parameters}
        states = {
            n: share(n, program.state_splits(n)) for n, p in parameters.items() if p.requires_grad
        }

        def stepped(names: Sequence[str]) -> int:
            held = {n for n in names if n in states}
            apart = [held_bytes[n] for n in parameters if n in held and states[n] < held_bytes[n]]
            fused = bool(plan.fusions)
            sizes = [states[n] for n in parameters if n in held]
            split = (n for n in held if n in program.owned and program.owned[n].level < 3)
            padded = sum(states[n] for n in split if states[n] * plan.shards > held_bytes[n])
            if self.shardable:
                return step_bytes(plan, self.step_memory, sum(sizes), sizes, apart, fused, padded)
            # Parameters, gradients and state are gathered (runtime.parameters.whole_matrices).
            sizes = [tensor_bytes(parameters[n]) for n in parameters if n in held]
            gathered = sum(
                tensor_bytes(parameters[n]) for n in held if states[n] < tensor_bytes(parameters[n])
            )
            together = int(gathered * (2 + self.optimizer_bytes))
            return together + step_bytes(plan, self.step_memory, sum(sizes), sizes, [], fused, 0)

        built = (*nn.Module.parameters(self.module), *self.module.buffers())
        # A frozen parameter that the forward updates is a buffer in the graph.
        buffers: dict[str, torch.Tensor] = {
            n: p for n, p in parameters.items() if not p.requires_grad
        }
        buffers |= dict(self.module.named_buffers(remove_duplicate=False))
        return Resident(
            held_bytes,
            {n: tensor_bytes(b) for n, b in buffers.items()},
            states,
            sum(tensor_bytes(t) for t in batch.tensors.values()),
            self.optimizer_bytes,
            plan.offload,
            whole={n: tensor_bytes(p) for n, p in parameters.items()},
            built=sum(map(tensor_bytes, built)),
            step=stepped,
        )


def model_of(
    module: nn.Module,
    loss_fn: LossFn | None,
    optimizer: torch.optim.Optimizer | None,
    device_type: str,
    *,
    shardable: bool = True,
    batch_dims: BatchDims = None,
) -> Model:
    """The model for devices of a type ("cpu" or "cuda"), with what its optimizer needs."""
    state, result = optimizer_bytes(optimizer), optimizer_memory_of(optimizer, device_type)
    return Model(module, loss_fn, state, shardable, result, batch_dims)


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def as_batch(example: Any) -> Batch:
    """An example batch, flattened like a call of the model."""
    return flatten_call(*as_call(example))


def check_supported(module: nn.Module) -> None:
    """Raises Unsupported (GA208) for a model that no plan supports: no parameters, dtypes, layouts,
    several devices."""
    check_parameters(module)
    devices = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        trained = isinstance(tensor, nn.Parameter)
        if tensor.is_quantized or (tensor.is_complex() and trained):
            raise Unsupported(
                what=f"dtype {tensor.dtype} of {name}",
                reason="gradients of such a tensor can not be summed over ranks",
                help_line="keep it as two real tensors, or exclude its module",
            )
        if tensor.is_sparse or tensor.layout != torch.strided:
            raise Unsupported(
                what=f"layout {tensor.layout} of {name}",
                reason="parameters must be dense",
                help_line=f"{name} = {name}.to_dense()",
            )
        devices.add(tensor.device)
    if len(devices) > 1:
        result = ", ".join(sorted(map(str, devices)))
        raise Unsupported(
            what=f"a model that is on several devices ({result})",
            reason="the plan decides where parameters lie",
            help_line="model.to('cpu') before graphaccel.optimize",
        )


def check_parameters(module: nn.Module) -> None:
    """Raises Unsupported (GA208) for a model without parameters, or with none that have a shape,
    and for one whose forward is no longer Python."""
    if next(nn.Module.parameters(module), None) is None:
        raise Unsupported(what="a model without parameters", reason="there is nothing to train")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise Unsupported(
                what=f"`{name}`, which has no shape yet,",
                reason="a lazy module makes its parameters when it is called the first time",
                help_line="model(batch)  # once, before the optimizer is made and optimize() "
                "is called",
            )
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            raise Unsupported(
                what=f"a TorchScript module ({f'`{name}`' if name else 'the model'})",
                reason="the graph is captured from the model's Python code, which it has no more",
                help_line="build it from its Python class, and load its state_dict()",
            )


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> float:
    """Bytes of state per byte of trained parameter: 2 for Adam's two moments, 1 for momentum. For
    an optimizer that cannot be tried (`probe_optimizer`), by its name."""
    if optimizer is None:
        return 0.0
    tried = tried_step(optimizer, "cpu")
    if tried is not None:
        return tried.state
    name = type(optimizer).__name__.lower()
    if "adam" in name or "lamb" in name:
        return 2.0
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return 0.0 if name == "sgd" and not momentum else 1.0


def without_data(module: nn.Module) -> nn.Module:
    """A copy without data, including functions that refer to the model's own modules. Meta tensors
    become fakes on the CPU: a graph on the meta device would mix with what the model creates on the
    CPU in its forward. Other tensors (plain attributes) keep their values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, Any] = {}
    memory: dict[int, torch.Tensor] = {}
    for parameter in nn.Module.parameters(module):
        fake = _fake(parameter.detach(), mode)
        known[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
        memory[memory_of(parameter)] = fake
    for buffer in module.buffers():
        memory[memory_of(buffer)] = known[id(buffer)] = _fake(buffer.detach(), mode)
    for _, tensor in _tensors(module):
        vars(known[id(tensor)]).update(values_on(tensor))
    _know_others(module, known, memory)
    result = copied(module, known, module.modules())
    for hooks in (result._forward_hooks, result._forward_pre_hooks):
        hooks.clear()  # they run when the script calls its own model
    return result


def with_data(result: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """A copy of a model of `without_data` that has data. tensors: values by the id of each
    parameter and buffer of it."""
    known: dict[int, Any] = {}
    for parameter in nn.Module.parameters(result):
        value = tensors[id(parameter)]
        known[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    known |= {id(buffer): tensors[id(buffer)] for buffer in result.buffers()}
    return copied(result, known, result.modules())


def follow_attributes(result: nn.Module, module: nn.Module) -> None:
    """Give a copy of `without_data` the Python attributes that its original has now, and let the
    same parameters of it require a gradient."""
    copies = dict(result.named_modules())
    originals = {name: m for name, m in module.named_modules() if name in copies}
    known: dict[int, Any] = {id(m): copies[name] for name, m in originals.items()}
    for name, m in originals.items():
        _follow_buffers(copies[name], m, fake_mode(result))
    fakes = dict(_tensors(result))
    memory: dict[int, torch.Tensor] = {}
    for name, tensor in _tensors(module):
        if name in fakes:
            known[id(tensor)] = fakes[name]
            follow_values(fakes[name], tensor)
            if isinstance(tensor, nn.Parameter):
                fakes[name].requires_grad_(tensor.requires_grad)
            memory[memory_of(tensor)] = fakes[name].detach()
    _know_others(module, known, memory)
    own = {
        name: {k: v for k, v in vars(m).items() if k not in _STRUCTURE}
        for name, m in originals.items()
    }
    for name, values in copied(own, known, originals.values()).items():
        state = vars(copies[name])
        for gone in [k for k in state if k not in _STRUCTURE and k not in values]:
            del state[gone]
        state.update(values)


def fake_mode(result: nn.Module) -> FakeTensorMode:
    """The mode of the tensors of a copy of `without_data`."""
    return next(p.fake_mode for p in nn.Module.parameters(result) if isinstance(p, FakeTensor))


def _follow_buffers(copy: nn.Module, original: nn.Module, mode: FakeTensorMode) -> None:
    """Let the buffers of a copy of `without_data` be those that its original has now."""
    buffers: dict[str, torch.Tensor | None] = {}
    for name, buffer in original._buffers.items():
        own = copy._buffers.get(name)
        if buffer is None:
            buffers[name] = None
        elif own is not None and (own.shape, own.dtype) == (buffer.shape, buffer.dtype):
            buffers[name] = own
        else:
            buffers[name] = _fake(buffer.detach(), mode)
    restore_buffers(copy, buffers)
    copy._non_persistent_buffers_set |= original._non_persistent_buffers_set


_STRUCTURE = STRUCTURE | {RECORD}


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _know_others(module: nn.Module, known: dict[int, Any], memory: dict[int, torch.Tensor]) -> None:
    """Give the copy's `deepcopy` memo the tensors that are no parameters or buffers and are not
    copied."""
    for held in held_by_module(module):
        tensor = held.value
        if not isinstance(tensor, torch.Tensor) or id(tensor) in known:
            continue
        fake = memory.get(memory_of(tensor))
        if fake is not None:  # a view of a parameter: in the copy a view of the copy's
            known[id(tensor)] = fake.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        elif tensor.grad_fn is not None:  # computed before; `deepcopy` refuses it
            known[id(tensor)] = tensor.detach().clone().requires_grad_()


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if tensor.device.type != "meta" and not isinstance(tensor, RemoteTensor):
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
