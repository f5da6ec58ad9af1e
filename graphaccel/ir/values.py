"""Fake values of graph nodes: propagation on fake tensors, storages and their bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.fakes import FakeTensor, FakeTensorMode, new_fake
from graphaccel.compat.torch.tensors import storage_key


class _Values(fx.Interpreter):
    """Runs each call, unless an equal call on tensors with equal metadata ran before: layers repeat
    their calls. Calls whose results may share storage with their inputs always run."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._made: dict[Hashable, Callable[[], Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        key = self._key(n)
        if key is not None and key in self._made:
            result = n.meta["val"] = self._made[key]()
            return result
        result = super().run_node(n)
        if key is not None:
            make = _maker(result, [self.env[source] for source in n.all_input_nodes])
            if make is not None:
                self._made[key] = make
        if n.target is torch.ops._c10d_functional.wait_tensor.default:
            # It returns what it waited for; its fake would be a copy.
            result = self.env[operands(n)[0]]
        n.meta["val"] = result
        return result

    def _key(self, n: fx.Node) -> Hashable | None:
        """What the metadata of a call's result depends on; None where it always runs."""
        if n.op != "call_function" or not _returns_new(n.target):
            return None
        try:
            key = n.target, self._described(n.args), self._described(tuple(n.kwargs.items()))
            hash(key)
        except TypeError:  # a value without a hash, a symbolic number
            return None
        return key

    def _described(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = self.env[value]
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor) or value.constant is not None:
                raise TypeError("its value is known")
            return (value.dtype, value.device, tuple(value.shape), value.stride(),
                    value.storage_offset(), value.is_conj(), value.is_neg())  # fmt: skip
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._described, value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TypeError("a comparison would fix it")
        return type(value), value


@cache
def _returns_new(target: Any) -> bool:
    """Whether an op's schema says that no result shares storage with an argument."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return not any(a.alias_info for a in (*schema.arguments, *schema.returns))


def _maker(result: Any, inputs: Sequence[Any]) -> Callable[[], Any] | None:
    """A function that creates tensors like a result; None where they share storage with an input,
    which some ops do where they have nothing to do, or with each other."""
    many = isinstance(result, (tuple, list))
    built = list(result) if many else [result]
    if not all(isinstance(t, FakeTensor) and t.constant is None for t in built):
        return None
    storages = {storage_key(t) for t in built}
    given = {storage_key(t) for value in inputs for t in tensors_of(value)}
    alone = len(storages) == len(built) and not storages & given
    if not alone or any(t.storage_offset() for t in built):
        return None
    if many:
        return lambda: type(result)([new_fake(t) for t in built])
    return lambda: new_fake(result)


def propagate(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Set `meta["val"]` on every node by running the graph on fake `inputs`, in place.

    Shapes, dtypes, strides and shared storages are then those of the real run.
    """
    nodes = list(graph.graph.nodes)
    mode = (
        next((i.fake_mode for i in inputs if isinstance(i, FakeTensor)), None) or FakeTensorMode()
    )
    with mode, torch.no_grad():
        _Values(graph).run(*inputs)
    assert all("val" in n.meta for n in nodes if n.op == "call_function")


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
