"""Gradient rules written in Python: `torch.autograd.Function` and hooks on activations.

Export records the ops of a forward without these rules. During export each call is therefore
recorded as one op; in the forward graph a `PythonFunction` replaces it, which calls the user's own.
To differentiate, the forward graph is run: the user's backward then becomes ops of the joint graph.

exported                                                  after
  %l: = graphaccel.python_function([%h], 0)                 %l: = Reverse(%h, 0.5)
  %y: f32[8,16] = getitem(%l, 0)                            %y: f32[8,16] = getitem(%l, 0)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)


class RuleRefused(Exception):
    """A gradient rule that cannot be part of a graph. what: the rule; reason; line: what to type
    instead."""

    def __init__(self, what: str, reason: str, line: str) -> None:
        super().__init__(reason)
        self.what, self.reason, self.line = what, reason, line


class HookOnTensor(torch.autograd.Function):
    """Identity on a tensor, with a hook as its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.hook(gradient), None


@dataclass(frozen=True, eq=False)
class PythonFunction:
    """The target of a node, called with the node's arguments. The node returns the tensors of what
    the user's rule returns, as a tuple.

    name: for graphs as text. rule: what the user wrote, a subclass of `torch.autograd.Function` or
    a hook. held: arguments that are not plain values, by position. dtypes: of the tensors among the
    arguments, as they were captured; empty where any is accepted.
    """

    name: str
    rule: Any
    held: tuple[tuple[int, Any], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        given = list(args)
        for place, value in self.held:
            given[place] = value
        hook = not isinstance(self.rule, type)
        result = HookOnTensor.apply(*given, self.rule) if hook else self.rule.apply(*given)
        several = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(t for t in several if isinstance(t, torch.Tensor))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PythonFunction)
            and (self.name, self.dtypes) == (other.name, other.dtypes)
            and _same_rule(self.rule, other.rule)
            and len(self.held) == len(other.held)
            and all(
                i == j and (a is b) for (i, a), (j, b) in zip(self.held, other.held, strict=True)
            )
        )

    def __hash__(self) -> int:
        return hash((self.name, self.dtypes))


def _same_rule(left: Any, right: Any) -> bool:
    """Whether two rules are equal: one class, or functions of one line whose closures have equal
    plain values (each forward creates its lambdas anew)."""
    if left is right:
        return True
    if not isinstance(left, FunctionType) or not isinstance(right, FunctionType):
        return False
    if left.__code__ is not right.__code__:
        return False
    own, other = _closed(left), _closed(right)
    return all(
        a is b or (isinstance(a, _PLAIN) and a == b) for a, b in zip(own, other, strict=True)
    )


def _closed(function: FunctionType) -> list[Any]:
    cells: tuple[CellType, ...] = function.__closure__ or ()
    return [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ())]


@dataclass(frozen=True)
class Result:
    """Layout of a tensor that a call returns, and whether it can have a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Result:
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class FunctionCall:
    """A recorded call. args: of its node; a tensor is a `Slot`, its position among the tensors that
    are passed to the op."""

    target: PythonFunction
    args: tuple[Any, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Slot:
    """The position of a tensor among those passed to the op."""

    number: int


@dataclass
class Calls:
    """The record of one export. marks: results of calls for a hook, with the hook's handle: the
    program returns them last, so that they are part of it."""

    calls: list[FunctionCall] = field(default_factory=list)
    marks: list[tuple[torch.Tensor, Any]] = field(default_factory=list)


CALLS: ContextVar[Calls] = ContextVar("calls")
"""The record of the running export."""


def python_function() -> Any:
    """The op that represents a call during export: (tensors, number of the call) → tensors."""
    name, ops = "python_function", torch.ops.graphaccel
    if not hasattr(ops, name):
        library = torch.library.Library("graphaccel", "FRAGMENT")
        library.define(f"{name}(Tensor[] tensors, int call) -> Tensor[]")

        def fake(tensors: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
            return [result.empty() for result in CALLS.get().calls[call].results]

        torch.library.register_fake(f"graphaccel::{name}", fake, lib=library)
        built: Any = ops.python_function.default
        built.graphaccel_library = library  # kept alive as long as its op
    return ops.python_function.default


def put_back(graph: fx.GraphModule, calls: Calls) -> None:
    """Rewrite an exported graph in place: nodes of recorded calls call the user's rules, and hooked
    tensors are replaced for all their readers. The marks are no longer returned."""
    op = python_function()
    output = graph.graph.output_node()
    returned: Any = output.args[0]
    kept = len(returned) - len(calls.marks)
    marks = [mark.args[0] for mark in returned[kept:]]
    output.args = (type(returned)(returned[:kept]),)
    for node in reversed(marks):  # of two hooks on a tensor, the first registered runs first
        source = node.args[0][0]
        users = [user for user in source.users if user is not node]
        last = source
        if source.op == "placeholder":
            last = list(graph.graph.find_nodes(op="placeholder"))[-1]
        last.append(node)
        hooked = next(iter(node.users), None)
        if hooked is None:
            with graph.graph.inserting_after(node):
                hooked = graph.graph.call_function(operator.getitem, (node, 0))
            hooked.meta = {k: v for k, v in node.meta.items() if k != "val"}
            hooked.meta["val"] = node.meta["val"][0]
        node.append(hooked)
        for user in users:
            user.replace_input_with(source, hooked)
    for node in graph.graph.find_nodes(op="call_function", target=op):
        tensors, number = node.args
        call = calls.calls[number]

        def filled(value: Any, tensors: Any = tensors) -> Any:
            return tensors[value.number] if isinstance(value, Slot) else value

        args: Any = map_aggregate(call.args, filled)
        node.target, node.args, node.kwargs = call.target, args, {}
    graph.graph.lint()
    graph.recompile()
