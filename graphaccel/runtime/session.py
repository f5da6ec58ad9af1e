"""A model under a plan on this rank: its parameters, its compiled steps, its steps so far."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphaccel.errors import BatchesDiffer, RankLost
from graphaccel.ir.program import StepProgram
from graphaccel.runtime.executor import (
    Executor,
    Held,
    StepResult,
    first_line,
    is_connection,
)
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.remote import RemoteTensor
from graphaccel.schedule.table import Schedule

_CHECKED_STEPS = 3


@dataclass(frozen=True)
class CompiledStep:
    """One step for one shape of batch.

    leaves: turns a call's (args, kwargs) into batch leaves. rebuild: turns the loss and the other
    outputs into what the user's model returns.
    """

    program: StepProgram
    schedule: Schedule = field(repr=False)
    microbatches: int
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    rebuild: Callable[[torch.Tensor | None, Mapping[int, torch.Tensor]], Any] = field(repr=False)

    @cached_property
    def reached(self) -> frozenset[str]:
        """Parameters that get a gradient, on this rank or another."""
        return self.program.reached


class Session:
    """Owns what a rank holds between steps."""

    def __init__(self, model: nn.Module, mesh: Mesh, scale: LossScale | None) -> None:
        self.model, self.mesh, self.scale = model, mesh, scale
        self.steps = 0
        self.homes: dict[str, tuple[int, ...]] = {}
        self._executors: dict[int, Executor] = {}

    def settle(
        self, homes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str], optimizer: Any
    ) -> None:
        """Let go of the parameters and buffers of other stages; they become RemoteTensors in place.

        Parameter objects keep their identity: optimizers, groups and schedulers go on working.
        """
        self.homes = dict(homes) | {name: homes[of] for name, of in tied.items() if of in homes}
        if self.mesh.pipeline == 1:
            return
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not self.holds(name) and not isinstance(parameter, RemoteTensor):
                _make_remote(parameter, self.mesh.pipeline_group)
                if optimizer is not None:
                    optimizer.state.pop(parameter, None)
        for module_name, module in self.model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                full = f"{module_name}.{name}" if module_name else name
                if full in self.homes and not self.holds(full):
                    setattr(module, name, RemoteTensor(buffer, self.mesh.pipeline_group))

    def holds(self, name: str) -> bool:
        """Whether a stage of this rank has the parameter or buffer."""
        stages = self.homes.get(name)
        return stages is None or any(
            s % self.mesh.pipeline == self.mesh.pipeline_index for s in stages
        )

    def owner(self, name: str) -> int:
        """The pipeline coordinate to ask for a parameter or buffer."""
        stages = self.homes.get(name)
        return 0 if stages is None else stages[0] % self.mesh.pipeline

    def held(self, constants: Mapping[str, torch.Tensor]) -> Held:
        """What graphs read by name."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return Held(
            {n: p.detach() for n, p in parameters.items() if self.holds(n)},
            {n: b for n, b in self.model.named_buffers(remove_duplicate=False) if self.holds(n)},
            {n: c.to(self.mesh.device) for n, c in constants.items()},
        )

    def step(self, compiled: CompiledStep, leaves: Sequence[Any]) -> StepResult:
        """Run one training or evaluation step on the leaves of the global batch."""
        if self.mesh.world > 1 and self.steps < _CHECKED_STEPS:
            try:
                self._check_batches(leaves)
            except RuntimeError as error:
                if not is_connection(error):
                    raise
                raise RankLost(
                    rank=self.mesh.rank,
                    stage=self.mesh.pipeline_index if self.mesh.pipeline > 1 else None,
                    lost=self.mesh.other or "another rank",
                    last_action="the step before",
                    waiting_for="the batches of all ranks, which are compared",
                    cause=first_line(error),
                ) from error
        self.steps += 1
        executor = self._executors.get(id(compiled))
        if executor is None:
            executor = Executor(
                compiled.program,
                compiled.schedule,
                self.mesh,
                self.held(compiled.constants),
                compiled.microbatches,
            )
            self._executors[id(compiled)] = executor
        return executor.run(leaves, self.scale)

    def evaluate(self, compiled: CompiledStep, leaves: Sequence[Any]) -> StepResult:
        """A forward of the whole batch: every data rank runs it alike."""
        executor = self._executors.get(id(compiled))
        if executor is None:
            executor = Executor(
                compiled.program,
                compiled.schedule,
                self.mesh,
                self.held(compiled.constants),
                1,
                whole=True,
            )
            self._executors[id(compiled)] = executor
        return executor.run(leaves)

    def _check_batches(self, leaves: Sequence[Any]) -> None:
        """Every rank must be given the same global batch; found out in the first steps, not in the
        loss."""
        digest = hashlib.blake2b(digest_size=7)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        number = int.from_bytes(digest.digest(), "big")
        mine = torch.tensor([number], dtype=torch.int64, device=self.mesh.device)
        numbers = [torch.empty_like(mine) for _ in range(self.mesh.world)]
        dist.all_gather(numbers, mine, group=self.mesh.world_group)
        values = [int(n) for n in numbers]
        if len(set(values)) > 1:
            odd = tuple(rank for rank, value in enumerate(values) if value != values[0])
            raise BatchesDiffer(step=self.steps, ranks=odd)


def _make_remote(parameter: nn.Parameter, group: Any) -> None:
    remote = nn.Parameter(
        RemoteTensor(parameter.detach(), group), requires_grad=parameter.requires_grad
    )
    remote.group = group
    torch.utils.swap_tensors(parameter, remote)
