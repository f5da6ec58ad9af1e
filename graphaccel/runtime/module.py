"""Makes the user's model object run the planned step when it is called.

In training the whole step (forward and backward of every microbatch) runs inside `model(...)`; the
stored gradients are handed out when the script calls `loss.backward()`, scaled by the gradient that
reaches the loss, so that accumulation, loss weights and extra penalty terms keep working.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch.modules import DDP_READS
from graphaccel.errors import GraphMisuse, RetainGraph
from graphaccel.kernels.host_copy import TO_HOST, wait
from graphaccel.runtime.execution.state import StepResult
from graphaccel.runtime.parameters.all_gradients import spoil
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.plain import copying, looks_like
from graphaccel.runtime.wrappers import refuse_bypass, refuse_inside


def attach(
    model: nn.Module,
    handle: Any,
    run: Callable[..., Any],
    state: Callable[..., Any] = lambda plain, _prefix: plain,
    whole: Callable[[], bool] = lambda: True,
    generating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Replace the forward of a model's class by `run(module, original_forward, args, kwargs)`, in
    place.

    handle becomes `model.graphaccel`; state(model, plain_state_dict) completes `state_dict()`;
    whole: whether this process holds all of the model (`runtime.plain.copying`). generating: around
    the model's `generate`, if it has one: many calls with the same weights.
    """
    original = type(model)
    reached = [0]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        reached[0] += 1
        return run(self, original.forward, args, kwargs)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # says GA410, not its own

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "forward" not in vars(self) or self is not model or not torch.is_grad_enabled():
            return original.__call__(self, *args, **kwargs)
        before = reached[0]
        result = original.__call__(self, *args, **kwargs)
        if reached[0] == before and self.training:
            refuse_bypass(self)
        return result

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return state(original.state_dict(self, *args, **kwargs), kwargs.get("prefix", ""))

    built = type(
        original.__name__,
        (original,),
        {
            "__call__": call,
            "forward": looks_like(original.forward, forward),
            "state_dict": looks_like(original.state_dict, state_dict),
            **copying(original, whole),
            **_generating(original, generating),
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__signature__": getattr(original, "__signature__", None),
            "_graphaccel_original": original,
            DDP_READS: property(refuse_inside),
            "graphaccel": handle,
        },
    )
    model.__class__ = built


def _generating(
    original: Any, around: Callable[[], AbstractContextManager[None]]
) -> dict[str, Callable[..., Any]]:
    """The `generate` of a class, inside of `around()`."""
    own = getattr(original, "generate", None)
    if not inspect.isfunction(own):
        return {}

    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with around():
            return own(self, *args, **kwargs)

    return {"generate": looks_like(own, generate)}


def original_class(model: nn.Module) -> type:
    """The class a model had before `attach`."""
    return getattr(type(model), "_graphaccel_original", type(model))


def own_forward(model: nn.Module) -> Callable[..., Any]:
    """What a call of the model ran before `attach`, without hooks."""
    return vars(model).get("forward") or partial(original_class(model).forward, model)


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    model.__class__ = original_class(model)


class HandOut(torch.autograd.Function):
    """The loss, whose backward hands out gradients that were computed together with it."""

    @staticmethod
    def forward(
        ctx: Any,
        result: StepResult,
        marked: frozenset[int],
        offloaded: bool,
        names: tuple[str, ...],
        *parameters: torch.Tensor,
    ) -> Any:
        """The loss; `parameters` are those that may get a gradient, named `names`.

        marked: ids of parameters whose gradients have a NaN after an overflow, for the optimizer's
        step to detect; others have no gradients then, which needs a device synchronisation.
        offloaded: parameters are offloaded to the host, and get their gradients there.
        """
        ctx.result, ctx.marked, ctx.away, ctx.names = result, marked, offloaded, names
        ctx.parameters = parameters
        assert result.loss is not None
        return result.loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """Each gradient, times the gradient that reached the loss."""
        if ctx.result is None or torch.is_grad_enabled():  # enabled here: create_graph=True
            raise RetainGraph()
        gradients, overflow = ctx.result.gradients, ctx.result.overflow
        layouts = ctx.result.layouts
        parameters = ctx.parameters
        ctx.result = ctx.parameters = None
        dropped: set[int] = set()
        if overflow is not None:
            # The same on every rank, so that clipping stacks equally many norms everywhere.
            others = {id(p) for p in parameters} - ctx.marked
            dropped = others if others and bool(overflow) else dropped
        own = list(gradients.values())
        if own and not (gradient.device.type == "cpu" and gradient.item() == 1.0):
            torch._foreach_mul_(own, gradient.to(own[0].dtype))
        if overflow is not None and ctx.marked:
            spoil(own, overflow)
        handed = []
        for name, parameter in zip(ctx.names, parameters, strict=True):
            if id(parameter) in dropped:
                handed.append(None)
                continue
            if isinstance(parameter, RemoteTensor):
                handed.append(RemoteTensor(parameter, parameter.elsewhere))
                continue
            local = gradients.pop(name, None)
            if local is not None and ctx.away:
                local = TO_HOST(local)
            if local is not None and name in layouts:
                local = ShardTensor(local, layouts[name])
            handed.append(local)
        if ctx.away:
            wait(gradient.device)
        return (None, None, None, None, *handed)


class Kept(torch.autograd.Function):
    """An output beside the loss: a gradient that reaches it would be lost, so it is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """The output, which requires a gradient as in the user's model."""
        ctx.name = name
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:  # type: ignore[override]
        """Raises GraphMisuse (GA407)."""
        raise GraphMisuse(
            what=f"the script's loss depends on output `{ctx.name}`, and the step differentiates "
            "what looks like the model's own loss only",
            help_line="let the script compute the whole loss:  "
            "graphaccel.optimize(model, optimizer, loss_fn='outside')",
        )
