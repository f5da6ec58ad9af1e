"""What `optimize` fixes for a model, and what is known once its plan is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import DeviceMesh

from graphaccel.arguments import FIRST_STEP, GLOBAL, MAX_PROGRAMS
from graphaccel.capture.batch import Batch
from graphaccel.compiler.compiler import Compiler, Planned
from graphaccel.compiler.registered import Registered
from graphaccel.compiler.smaller_plan import Smaller, smaller_plan
from graphaccel.dispatch.updates import Updates
from graphaccel.errors import DeviceOutOfMemory, GraphAccelError
from graphaccel.passes.context import Fixed
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.proof.gate import Gate
from graphaccel.runtime.agreement import Agreement
from graphaccel.runtime.loss_guard import IGNORE
from graphaccel.runtime.parameters.step_hooks import StepHooks
from graphaccel.runtime.session import Session

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class RunSettings:
    """How a model runs, as the arguments of `optimize` say.

    devices: number of ranks. device: where this rank computes. timeout: seconds after which a rank
    that does not answer counts as lost. clip_norm, check, on_nonfinite, max_programs, batch: as
    `optimize` takes them.
    """

    devices: int
    device: torch.device
    timeout: float
    clip_norm: float | None = None
    check: str = FIRST_STEP
    on_nonfinite: str = IGNORE
    max_programs: int = MAX_PROGRAMS
    batch: str = GLOBAL

    @property
    def patience(self) -> timedelta:
        """`timeout`, as torch.distributed takes it."""
        return timedelta(seconds=self.timeout)


@dataclass(frozen=True)
class Run:
    """A model that trains, and what all its steps share.

    agreement: compares across ranks what they are about to do. gate: comparisons of the first step
    with eager code. hooks: of the optimizer's steps.
    """

    model: nn.Module
    optimizer: Optimizer | None
    compiler: Compiler
    settings: RunSettings
    agreement: Agreement
    gate: Gate
    hooks: StepHooks

    @staticmethod
    def of(
        model: nn.Module, optimizer: Optimizer | None, compiler: Compiler, settings: RunSettings
    ) -> Run:
        """A run that has not begun."""
        devices = settings.devices
        agreement = Agreement(devices, settings.device, settings.patience, optimizer)
        gate = Gate(on=settings.check == FIRST_STEP, ranks=devices)
        return Run(model, optimizer, compiler, settings, agreement, gate, StepHooks())


@dataclass(frozen=True)
class Prepared:
    """A run whose plan is chosen, and whose rank holds only what the plan gives it.

    memory: predicted, of this rank. meshes: for sharded state (`runtime.parameters.state`).
    updates: what takes part in the optimizer's step. registered: the model's parameters at capture.
    dtypes: of the batch's tensors, by name.
    """

    planned: Planned
    session: Session
    memory: StageMemory | None
    meshes: Mapping[int, DeviceMesh] = field(repr=False)
    updates: Updates = field(repr=False)
    registered: Registered = field(repr=False)
    dtypes: Mapping[str, torch.dtype]

    @property
    def stored(self) -> Fixed:
        """Where and how the running programs hold the parameters."""
        parameter_shards = self.planned.program.parameter_shards
        return Fixed(self.session.homes, parameter_shards, self.session.groups)

    @property
    def has_all(self) -> bool:
        """Whether this rank holds every parameter in full."""
        return self.session.mesh.pipeline == 1 and not self.session.parameters

    @property
    def whole(self) -> bool:
        """Whether the model's own forward can run here: full parameters, none offloaded."""
        return self.has_all and not self.session.away

    def beside_prediction(self, error: DeviceOutOfMemory, compiler: Compiler) -> DeviceOutOfMemory:
        """The error with what was predicted for this rank."""
        memory = self.memory
        predicted = {} if memory is None else {"tensors": memory.tensors, "other": memory.other}
        smaller = self._smaller(compiler, error.actual)
        return DeviceOutOfMemory(
            stage=error.stage,
            action=error.action,
            predicted=predicted,
            actual=error.actual,
            recompute=not self.planned.plan.recompute,
            pins={} if smaller is None else smaller.pins,
            smaller=None if smaller is None else (smaller.tensors, smaller.instead_of),
        )

    def _smaller(self, compiler: Compiler, actual: Mapping[str, int]) -> Smaller | None:
        """Pins that are predicted to need less. actual: bytes of the device by kind."""
        if self.planned.plan.prediction is None:
            return None
        room = actual["tensors"] + actual["free"] if "tensors" in actual else None
        try:
            return smaller_plan(compiler, self.planned, room)
        except GraphAccelError:  # what is reported is that memory ran out
            return None


def dtypes_of(batch: Batch) -> dict[str, torch.dtype]:
    """The dtypes of a batch's tensors, by name."""
    return {batch.names[i]: t.dtype for i, t in batch.tensors.items()}
