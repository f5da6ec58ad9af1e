"""Checks that the user's optimizer can step parameters that a plan spreads over devices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from graphaccel.compiler.compiler import Planned
from graphaccel.compiler.probe_coupling import coupling_of
from graphaccel.dispatch.updates import shards_later
from graphaccel.errors import NotElementwise
from graphaccel.runtime.parameters.optimizer_copy import inner_optimizer
from graphaccel.runtime.parameters.sharded_optimizer import is_elementwise
from graphaccel.runtime.parameters.step_hooks import closure_of
from graphaccel.runtime.parameters.whole_matrices import StateKeys

_COUPLED = "its step of one parameter depends on the gradients of others"
_CLOSURE = "its step computes the loss anew, by a closure"


def keeping_parameters_whole(
    optimizer: torch.optim.Optimizer | None, pins: Mapping[str, Any], devices: int
) -> dict[str, Any]:
    """The pins, with those that leave every process the whole model where the optimizer computes
    with all parameters at once, or steps another one: no other plan could be stepped."""
    if optimizer is None or devices == 1:
        return dict(pins)
    if is_elementwise(optimizer) and not inner_optimizer(optimizer):
        return dict(pins)
    single = _needs_closure(optimizer) or inner_optimizer(optimizer) != ""
    if single or (known := coupling_of(optimizer)).dependent or known.draws:
        return {"pipeline": 1, "tensor": 1, **pins}
    return dict(pins)


def state_keys(optimizer: torch.optim.Optimizer, planned: Planned) -> StateKeys | None:
    """None for an elementwise optimizer, or one whose state is whole; else the keys of the state
    that has the shape of its parameter.

    Raises NotElementwise (GA211) for an optimizer that couples parameters on several devices, and
    for one that steps another one's.
    """
    plan, program = planned.plan, planned.program
    sharded = bool(program.owned or program.parameter_shards) or shards_later(planned)
    inner = inner_optimizer(optimizer)
    if inner and (sharded or "optimizer" in plan.offload):
        reason = f"it calls the step of another optimizer, whose state stays behind: `{inner}`"
        raise NotElementwise(optimizer=type(optimizer).__name__, reason=reason, inner=inner)
    if is_elementwise(optimizer) or not (sharded or plan.pipeline > 1):
        return None
    known = coupling_of(optimizer)
    reason = _COUPLED if known.dependent else ""
    if sharded and _needs_closure(optimizer):
        reason = _CLOSURE
    elif known.draws or (sharded and known.unknown):
        reason = f"what its step depends on is not known: {known.unknown}"
    elif sharded and "optimizer" in plan.offload:
        reason = reason or "with optimizer state on the host it steps shards alone"
    if reason:
        kind = type(optimizer)
        own = not (kind.__module__.startswith("torch.optim") or known.draws)
        raise NotElementwise(optimizer=kind.__name__, reason=reason, own=own)
    return known.full if sharded else None


def refuse_closure(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """A hook before the steps of an optimizer whose parameters are partly on other pipeline ranks.

    Raises NotElementwise (GA211) for a closure of a step that may read gradients before the closure
    or between two calls of it: those of other ranks are away while an optimizer steps, and back
    after a call.
    """
    kind = type(optimizer)
    if closure_of(args, kwargs) is None or kind.__module__.startswith("torch.optim"):
        return
    inner = inner_optimizer(optimizer)
    if inner or (not is_elementwise(optimizer) and coupling_of(optimizer).unknown):
        raise NotElementwise(optimizer=kind.__name__, reason=_CLOSURE, inner=inner, own=not inner)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` takes a closure that has no default."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
