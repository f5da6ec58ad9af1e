"""Fake values of graph nodes: propagation on fake tensors, storages and their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch.fakes import FakeTensor, FakeTensorMode
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir.fake_calls import fake_call


def propagate(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Set `meta["val"]` on every node by running the graph on fake `inputs`, in place.

    Shapes, dtypes, strides and shared storages are then those of the real run.
    """
    mode = (
        next((i.fake_mode for i in inputs if isinstance(i, FakeTensor)), None) or FakeTensorMode()
    )
    given = iter(inputs)
    with mode, torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = next(given)
            elif node.op == "get_attr":
                node.meta["val"] = attrgetter(node.target)(graph)
            elif node.op == "output":
                node.meta["val"] = map_arg(node.args[0], _value)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), _value)
                node.meta["val"] = _returned(node, args, kwargs)


def _returned(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.target is torch.ops._c10d_functional.wait_tensor.default:
        return args[0]  # it returns what it waited for; its fake would be a copy
    assert node.op == "call_function"
    return fake_call(node.target, args, kwargs)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def fake_like(value: Any, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous fake tensor of another shape, in the fake mode of `value`."""
    if tuple(value.shape) == tuple(shape):
        return value
    with value.fake_mode:
        return torch.empty(tuple(shape), dtype=value.dtype, device=value.device)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """A call's positional arguments, without the type union that FX declares for them."""
    return node.args


def op_of(node: fx.Node) -> Any:
    """What a call calls, without the type union that FX declares for it."""
    return node.target


def returned(graph: fx.GraphModule) -> Sequence[Any]:
    """The nodes that a graph returns as a list."""
    nodes: Any = graph.graph.output_node().args[0]
    return nodes


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_of(v)]
    return []


def storages(values: Iterable[Any]) -> dict[int, int]:
    """Distinct storages behind some values: identity → bytes."""
    results = {}
    for value in values:
        for tensor in tensors_of(value):
            storage = tensor.untyped_storage()
            results[storage_key(tensor)] = storage.nbytes()
    return results


def shares(node: fx.Node) -> tuple[tuple[int, int] | None, ...]:
    """For each tensor of a node's value, the (input, tensor of it) whose storage it shares, if any;
    input -1 is the value itself.

    Copies of a node share one value; `keep_shares` records what it was computed from.
    """
    value, known = node.meta.get("shares", (None, ()))
    if value is not None and value is node.meta["val"]:
        return known
    given = {
        storage_key(tensor): (i, j)
        for i, source in enumerate(node.all_input_nodes)
        for j, tensor in enumerate(tensors_of(source.meta["val"]))
    }
    own = [storage_key(tensor) for tensor in tensors_of(node.meta["val"])]
    return tuple(
        given.get(key, (-1, own.index(key)) if own.index(key) < place else None)
        for place, key in enumerate(own)
    )


def keep_shares(graph: fx.Graph) -> None:
    """Record on each call whose storage its results share, for copies that have other inputs."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["shares"] = (node.meta["val"], shares(node))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a contiguous run of memory, in some order of its dims."""
    expected = 1
    for stride, size in sorted(
        (st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
    ):
        if stride != expected:
            return False
        expected = stride * size
    return True


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that called a node's op, as in `model.named_modules()`."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return re.sub(r"@\d+$", "", paths[-1]).removeprefix("model").removeprefix(".") if paths else ""
