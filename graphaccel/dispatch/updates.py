"""Registers on the user's optimizer what takes part in its step under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh

from graphaccel.compiler.compiler import Planned
from graphaccel.compiler.probe_coupling import DRAWS
from graphaccel.dispatch.first_update import first_update
from graphaccel.errors import NotElementwise
from graphaccel.runtime.parameters.all_gradients import AllGradients
from graphaccel.runtime.parameters.host import HostCopies
from graphaccel.runtime.parameters.optimizer_step import OptimizerStep
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded_optimizer import ShardedOptimizer
from graphaccel.runtime.parameters.state import OptimizerState
from graphaccel.runtime.parameters.step_hooks import StepHooks, closure_of
from graphaccel.runtime.parameters.whole_matrices import StateKeys, WholeMatrixOptimizer
from graphaccel.runtime.session import Session

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Updates:
    """What takes part in an optimizer's step.

    gradients: norm and overflow of the gradients of all ranks. step: our fused step. host: the
    copies of parameters that are updated on the host. shards, state: what steps, saves and loads
    shards.
    """

    gradients: AllGradients | None = None
    step: OptimizerStep | None = None
    host: HostCopies | None = None
    shards: ShardedOptimizer | WholeMatrixOptimizer | None = None
    state: OptimizerState | None = None

    def marked(self, optimizer: Optimizer | None) -> frozenset[int]:
        """Ids of the parameters whose gradients get a NaN after an overflow: the step leaves out
        their update, also where the gradients are of several calls."""
        if optimizer is None or self.gradients is None or not self.gradients.marks:
            return frozenset()
        return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])

    def follow(self, model: nn.Module, session: Session) -> None:
        """Use the layouts that the session has now."""
        named = dict(model.named_parameters(remove_duplicate=False))
        if self.shards is not None:
            layouts = session.states if self.host is None else session.step_layouts()
            self.shards.add_layouts(named, layouts)
        if self.state is not None:
            self.state.add_layouts({id(named[n]): layout for n, layout in session.states.items()})


def register_updates(
    model: nn.Module,
    optimizer: Optimizer | None,
    hooks: StepHooks,
    planned: Planned,
    session: Session,
    clip_norm: float | None,
    meshes: Mapping[int, DeviceMesh],
    keys: StateKeys | None = None,
    *,
    compare: bool = False,
) -> Updates:
    """Add to the optimizer's hooks, those that must see gradients first. The session's memory is
    laid out already.

    keys: of state with the shape of its parameter, for an optimizer that steps whole parameters.
    compare: the first update with that of one device.
    """
    on_host = "optimizer" in planned.plan.offload
    host = HostCopies(session.mesh.device) if on_host and not session.away else None
    if optimizer is None:
        return Updates(host=host)
    fused = bool(planned.plan.fusions) or on_host
    gradients = _all_gradients(model, optimizer, session, clip_norm)
    step = OptimizerStep(optimizer, gradients, on_host=on_host) if fused else None
    if gradients is not None:
        hooks.add(gradients.before)
    if step is None and gradients is not None:
        hooks.add(gradients.prepare_all)
    if session.mesh.pipeline > 1:
        _RemoteGradients(optimizer, hooks)
    first, layouts = None, session.states if host is None else session.step_layouts()
    if compare and (layouts or step is not None or session.mesh.pipeline > 1):
        clipping, on_host = None if step is None else gradients, host is not None
        first = first_update(model, optimizer, session, keys, layouts, clipping, on_host=on_host)
    if first is not None:
        hooks.add(first.before)
    shards, state = None, None
    later = shards_later(planned)
    if session.states or later or host is not None:
        if keys is None:
            size = planned.plan.bucket_bytes
            shards = ShardedOptimizer(optimizer, hooks, size, host)
        else:
            shards = WholeMatrixOptimizer(optimizer, hooks, keys)
    if session.states or later or session.mesh.pipeline > 1:
        state = OptimizerState(optimizer, meshes)
    if first is not None:
        optimizer.register_step_post_hook(first.after)  # behind those that put shards back
    if step is not None:
        hooks.add_after_closures(step.in_closure)
        step.start()
    if session.states or later or session.mesh.pipeline > 1:
        _Draws(optimizer, hooks)
    updates = Updates(gradients, step, host, shards, state)
    updates.follow(model, session)
    return updates


def shards_later(planned: Planned) -> bool:
    """Whether unfreezing a parameter that the step does not train could shard more state."""
    names = {spec.name for spec in planned.step.inputs if spec.kind == "parameter"}
    return bool(planned.plan.zero and planned.plan.shards > 1 and names - planned.step.trainable)


def _all_gradients(
    model: nn.Module, optimizer: Optimizer, session: Session, clip_norm: float | None
) -> AllGradients | None:
    """What clips, and what leaves out an update after an overflow; None where neither is needed."""
    # LBFGS computes its gradients in the step: each call that overflows has none
    scale = None if isinstance(optimizer, torch.optim.LBFGS) else session.scale
    if clip_norm is None and scale is None:
        return None
    named = model.named_parameters()
    elsewhere = [p for n, p in named if session.owner(n) != session.mesh.pipeline_index]
    return AllGradients(session.mesh, clip_norm, scale=scale, elsewhere=elsewhere)


class _RemoteGradients:
    """Gradients of other pipeline ranks: away while an optimizer steps, which then leaves their
    parameters out, and there afterwards for a script that reads gradients.

    A step of the script's own may take a gradient for granted: it does not see the parameters."""

    def __init__(self, optimizer: Optimizer, hooks: StepHooks) -> None:
        hooks.add(self.remove)
        optimizer.register_step_post_hook(self.put_back)
        self._removed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hidden: list[tuple[dict[str, Any], int, torch.Tensor]] = []

    def remove(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook before the step."""
        self.put_back()  # the previous step may have raised
        given = [p for group in optimizer.param_groups for p in group["params"]]
        self._removed = [
            (p, p.grad) for p in given if isinstance(p, RemoteTensor) and p.grad is not None
        ]
        for parameter, _gradient in self._removed:
            parameter.grad = None
        if type(optimizer).__module__.startswith("torch.optim"):
            return
        for group in optimizer.param_groups:
            params = group["params"]
            hidden = [(i, p) for i, p in enumerate(params) if isinstance(p, RemoteTensor)]
            self._hidden += [(group, i, p) for i, p in hidden]
            group["params"] = [p for p in params if not isinstance(p, RemoteTensor)]

    def put_back(self, *_: Any) -> None:
        """A hook after the step."""
        for group, place, parameter in self._hidden:
            group["params"].insert(place, parameter)
        for parameter, gradient in self._removed:
            parameter.grad = gradient
        self._removed, self._hidden = [], []


class _Draws:
    """Refuses a step that draws random numbers, where each rank steps other parameters: what is
    drawn for one would be another one's. Its first steps were probed before; this one began
    later."""

    def __init__(self, optimizer: Optimizer, hooks: StepHooks) -> None:
        """The last of the hooks: it may raise."""
        hooks.add(self.before)
        optimizer.register_step_post_hook(self.after)
        self._state: torch.Tensor | None = None

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """A hook before the step. A closure may run the model, which may draw."""
        own = not type(optimizer).__module__.startswith("torch.optim")
        watched = own and closure_of(args, kwargs) is None
        self._state = torch.get_rng_state() if watched else None

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook after the step.

        Raises NotElementwise (GA211).
        """
        state, self._state = self._state, None
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            raise NotElementwise(optimizer=type(optimizer).__name__, reason=DRAWS)
