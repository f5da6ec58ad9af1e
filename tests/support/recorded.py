"""The ATen calls that eager mode makes of a function and its gradient, as nodes on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphaccel.sharding.rules.prove import call_node
from tests.support.ops.calls import Arguments, Case, Draw


class _Record(TorchDispatchMode):
    """Keeps every call, with its arguments as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def copied(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) else value

        self.calls.append((func, *tree_map(copied, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def recorded(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The calls of `function(*args, **kwargs)` and of the gradient of its sum, in order."""
    record = _Record()
    with record:
        result = function(*args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    grads = [torch.randn_like(t) for t in outputs]
    if outputs and inputs:
        with record:
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return record.calls


def recorded_nodes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[fx.Node]:
    """`recorded` as nodes; calls that write or read no tensor are left out."""
    nodes = []
    for target, given, named in recorded(function, *args, **kwargs):
        tensors = [t for t in tree_leaves((given, named)) if isinstance(t, Tensor)]
        if tensors and not target._schema.is_mutable:
            node = call_node(target, given, named)
            values = node.meta["val"]
            values = values if isinstance(values, (tuple, list)) else [values]
            if any(isinstance(v, Tensor) for v in values):
                nodes.append(node)
    return nodes


Traced = Callable[[Draw], tuple[Any, ...]]


def through(entries: Mapping[tuple[Any, ...], Traced]) -> dict[Any, Case]:
    """Cases of ops that a function calls, forward or backward.

    entries: ops → what draws (function, *its arguments); floating tensors want a gradient. The case
    of an op is the last call of it, so what it was saved in the forward is what it is given.
    """
    return {target: _case(target, draw) for ops, draw in entries.items() for target in ops}


def _case(target: Any, draw: Traced) -> Case:
    def case(d: Draw) -> Arguments:
        function, *given = draw(d)
        args = tree_map(lambda x: _tracked(x) if isinstance(x, Tensor) else x, given)
        calls = [c for c in recorded(function, *args) if c[0] is target]
        assert calls, f"{target} is not called"
        return calls[-1][1:]

    return case


def _tracked(value: Tensor) -> Tensor:
    return value.requires_grad_() if value.is_floating_point() or value.is_complex() else value
