"""Refuses wrappers around or inside an optimized model that bypass or split its planned step.

These are wrappers that split or compile the step a second time, and forwards that are called
instead of the planned one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch.modules import DDP_READS
from graphaccel.errors import GraphMisuse, WrappedModel
from graphaccel.errors.messages import Location

_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")
_TWICE = "graphaccel splits the step over devices and sums the gradients itself"
_COMPILED = "the step is one graph already, whose forward and backward run in one call"
_COMPILE = (
    "leave torch.compile out; its compiler is had by:  "
    "graphaccel.optimize(model, optimizer, compile='inductor')"
)


def refuse_on(model: nn.Module) -> None:
    """Raises WrappedModel (GA410) if another system has wrapped a part of the model, or its
    forward, before optimize()."""
    for name, module in model.named_modules():
        kind, where = _parallel(type(module)), f"`{name}`" if name else "the model"
        if kind:
            raise WrappedModel(
                what=f"{where} is wrapped in {kind}",
                why=_TWICE,
                help_line="optimize the model without it; its settings are those of the plan",
            )
        if type(module).__name__ == "OptimizedModule" and type(module).__module__[:6] == "torch.":
            raise WrappedModel(
                what=f"{where} is one that torch.compile made", why=_COMPILED, help_line=_COMPILE
            )
    own = vars(model).get("forward")
    if own is not None:
        raise WrappedModel(
            what=f"`model.forward` was replaced by {_called(own)} before optimize()",
            location=_place(own),
            why="it stands on the model itself and would be called instead of the planned step",
            help_line="wrap the model after optimize(), or take it off before:  del model.forward",
        )


def refuse_around(model: nn.Module) -> None:
    """Raises WrappedModel (GA410) if another system's wrapper calls the model."""
    if torch.compiler.is_compiling():
        raise WrappedModel(
            what="the optimized model is called inside torch.compile",
            why=_COMPILED,
            help_line=_COMPILE,
        )
    kind = _parallel(type(model)) or (
        "DataParallel" if getattr(model, "_is_replica", False) else _parallel_caller("forward")
    )
    if kind:
        raise _inside(kind)


def refuse_inside(model: nn.Module) -> None:
    """What DistributedDataParallel reads of a model before it changes any of its tensors.

    Raises WrappedModel (GA410) there: it would go on to broadcast one rank's shards to the others.
    Raises AttributeError for anything else that reads it.
    """
    kind = _parallel_caller("__init__")
    if kind:
        raise _inside(kind)
    raise AttributeError(DDP_READS)


def _inside(kind: str) -> WrappedModel:
    return WrappedModel(
        what=f"the optimized model is inside {kind}",
        why=_TWICE,
        help_line="leave the wrapper out, and call the model that optimize() returned",
    )


def refuse_bypass(model: nn.Module) -> None:
    """Raises WrappedModel (GA410): a forward of the model itself bypassed the planned step."""
    own = vars(model)["forward"]
    raise WrappedModel(
        what=f"`model.forward` was replaced by {_called(own)}, "
        "which does not call the planned step",
        location=_place(own),
        why="the model then trains on this process alone, whatever the plan says",
        help_line="take it off:  del model.forward",
    )


def _parallel(kind: type) -> str:
    """The name of the torch wrapper that a class is or derives from; empty if it is none."""
    for base in kind.__mro__:
        if base.__name__ in _PARALLEL and base.__module__.startswith("torch."):
            return base.__name__
    return ""


def _parallel_caller(method: str) -> str:
    """The wrapper of which this method is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == method and "/torch/" in code.co_filename:
            kind = _parallel(type(frame.f_locals.get("self")))
            if kind:
                return kind
        frame = frame.f_back
    return ""


def _code(function: Any) -> Any:
    inner = getattr(function, "__func__", function)
    return getattr(inner, "__code__", None)


def _called(function: Callable[..., Any]) -> str:
    code = _code(function)
    name = getattr(function, "__name__", type(function).__name__)
    return f"`{name if code is None or name != 'forward' else code.co_name}`"


def _place(function: Callable[..., Any]) -> Location | None:
    code = _code(function)
    return None if code is None else Location(code.co_filename, code.co_firstlineno)


def refuse_transformed(*, whole: bool) -> None:
    """Raises GraphMisuse (GA407) for a call inside of a transform of torch.func, which the model's
    own forward answers where this process has all parameters. whole: whether it does."""
    if not whole:
        raise GraphMisuse(
            what="the model is called inside of a transform of torch.func, and this process has "
            "parts of its parameters only",
            help_line="keep parameters whole:  zero=0, tensor=1, pipeline=1",
        )
