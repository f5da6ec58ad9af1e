"""Lays out gradients and optimizer state of parameters that a later program of a run trains.

ZeRO 1 and 2 shard gradients and state of trained parameters alone: those of one that is unfrozen
get their layouts when the first program that trains it is compiled. Layouts of the others stay.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphaccel.ir.program import StepProgram
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.session import Session, all_axes


def add_layouts_of(session: Session, program: StepProgram, optimizer: Any) -> None:
    """Add the layouts of a program that is to run beside the session's, and shard the optimizer
    state that there is already. Collective."""
    own = dict(session.model.named_parameters(remove_duplicate=False))
    session.mesh.ensure(sorted(all_axes(program, session.mesh)))
    for name in program.owned:
        if name not in own or not session.holds(name):
            continue
        gradient, state = program.gradient_splits(name), program.state_splits(name)
        if len(gradient) > len(_splits(session.gradients.get(name))):
            session.gradients[name] = ShardLayout(own[name].shape, gradient, session.mesh)
        before = session.states.get(name)
        if len(state) > len(_splits(before)):
            layout = ShardLayout(own[name].shape, state, session.mesh)
            session.states[name] = layout
            if optimizer is not None:
                _shard_state(optimizer.state.get(own[name], {}), before, layout)


def _splits(layout: ShardLayout | None) -> tuple[Any, ...]:
    return () if layout is None else layout.splits


def _shard_state(state: dict[str, Any], before: ShardLayout | None, layout: ShardLayout) -> None:
    """Keep this rank's shard of state that is full, or sharded over fewer axes."""
    held = layout.shape if before is None else before.local_shape
    rest = ShardLayout(held, layout.splits[len(_splits(before)) :], layout.mesh)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == held:
            state[key] = rest.own(value).clone()
