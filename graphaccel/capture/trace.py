"""Trace a function of fake tensors, backward included, to a graph of ATen calls; a fast make_fx.

Does what `torch.fx.experimental.proxy_tensor.make_fx` does, for functions that make the same few
calls on the same few shapes thousands of times: each distinct call runs once, and later results are
rebuilt from its shape, strides and storage. A deep model is differentiated several times before it
is planned, and tracing took nine tenths of that time.

Only calls are traced that return new tensors, views of a tensor they read, or their first argument,
written in place: for anything else (tensors from outside, values, subclasses) it raises NotTraced,
and make_fx is the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.fx import traceback as fx_traceback

from graphaccel.compat.torch.fakes import FakeTensor, FakeTensorMode
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.compat.torch.modes import BareDispatchMode, without_modes
from graphaccel.compat.torch.ops import decomposes
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir.fakes import PLAIN
from graphaccel.ir.nodes import new_node

_KEPT = ("custom", "nn_module_stack", "stack_trace")
_OP = type(torch.ops.aten.add.Tensor)
_MASKS = (torch.bool, torch.uint8)
_NUMBERS = (int, float, bool, type(None))

Answers: TypeAlias = dict[Hashable, Any]
"""Cached results of calls, by op and argument metadata: shared by all traces of one model."""


class NotTraced(Exception):
    """The function does something that is not traced here."""


class _Kind(NamedTuple):
    """The layout of a tensor in a storage of so many bytes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class _Known:
    """A tensor of the trace, kept alive because it is looked up by its id. like: a meta tensor,
    which shares its storage with all views of it."""

    tensor: torch.Tensor
    node: fx.Node
    kind: _Kind
    like: torch.Tensor


@dataclass(frozen=True)
class _Result:
    """A tensor that a call returns: new, or a view of tensor argument number `of`, or that argument
    itself."""

    kind: _Kind
    of: int | None
    itself: bool = False


def trace(
    function: Callable[..., Sequence[torch.Tensor]],
    values: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    answers: Answers | None = None,
) -> fx.GraphModule:
    """The graph of `function(*values)`: a placeholder for each value, a result for each result.

    answers: from other traces; results of this one are added.

    Nodes have meta "val", a fake tensor of `mode`, and from `torch.fx.traceback` at their creation
    "custom", "nn_module_stack" and "stack_trace". Calls without readers are included.

    Raises NotTraced.
    """
    tracing = Tracing(mode, {} if answers is None else answers)
    with without_modes():  # the caller may be inside a fake mode of its own
        for number, value in enumerate(values):
            tracing.take(value, f"value_{number}")
        with tracing:
            results = function(*values)
    tracing.graph.output([tracing.known(r).node for r in results])
    return graph_module(torch.nn.Module(), tracing.graph)


def _kind(tensor: torch.Tensor) -> _Kind:
    if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
        raise NotTraced(f"a {type(tensor).__name__} that is no strided fake tensor")
    if tensor.is_conj() or tensor.is_neg() or tensor.constant is not None:
        raise NotTraced("a tensor that is a constant, or is conjugate or negative by a flag")
    shape, stride = tuple(tensor.shape), tensor.stride()
    offset: Any = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes()
    if not all(type(n) is int for n in (*shape, *stride, offset, size)):
        raise NotTraced("sizes that are symbols")
    return _Kind(tensor.dtype, tensor.fake_device, shape, stride, offset, size)


class Tracing(BareDispatchMode):
    """Intercepts every call, those of the backward included, and records it in `graph`."""

    supports_higher_order_operators = True  # they arrive here, and are refused

    def __init__(self, mode: FakeTensorMode, answers: Answers) -> None:
        super().__init__()
        self.graph, self.mode = fx.Graph(), mode
        self._known: dict[int, _Known] = {}
        self._inputs: dict[tuple[int, _Kind], torch.Tensor] = {}
        self._answers = answers

    def known(self, tensor: torch.Tensor) -> _Known:
        match = self._known.get(id(tensor))
        if match is None:
            raise NotTraced("a tensor from outside")
        return match

    def take(self, value: torch.Tensor, name: str) -> None:
        """Add an input; two with shared storage stay so."""
        kind = _kind(value)
        if kind.offset or kind.bytes != _bytes(kind):
            raise NotTraced("an input that is a part of a tensor")
        like = self._inputs.setdefault((storage_key(value), kind), self._like(kind))
        self._keep(value, self.graph.placeholder(name), kind, like)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return self.known(args[0]).kind.device
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any], *, whole: bool = False) -> Any:
        """A node for a call, and the call's result; this mode must not be active.

        whole: do not decompose the op. Raises NotTraced.
        """
        given: list[_Known] = []
        key = func, self._key(args, given), self._key(tuple(kwargs.items()), given)
        if key not in self._answers:
            self._answers[key] = self._ask(func, args, kwargs, given, whole)
        built = self._answers[key]
        if type(built) in _NUMBERS:
            return built  # not part of the graph
        name = func.overloadpacket.__name__
        if whole:  # make_fx names `__and__`, one call only here, so
            name = name.removeprefix("__").removesuffix("__")
        node = new_node(
            self.graph, "call_function", func, self._nodes(args), self._nodes(kwargs), name, {}
        )
        return self._give(built, node, given)

    def _key(self, value: Any, given: list[_Known]) -> Hashable:
        """A key of an argument; 1, 1.0 and True differ. Its tensors are appended to `given`."""
        if isinstance(value, torch.Tensor):
            known = self.known(value)
            given.append(known)
            return known.kind
        if isinstance(value, (tuple, list)):
            return type(value), *(self._key(v, given) for v in value)
        if isinstance(value, PLAIN):
            return type(value), value
        raise NotTraced(f"an argument that is a {type(value).__name__}")

    def _ask(
        self, func: Any, args: tuple, kwargs: dict[str, Any], given: list[_Known], whole: bool
    ) -> Any:
        """The result of a call, by running it."""
        devices = {known.kind.device for known in given}
        if type(func) is not _OP or _by_values(func, given):
            raise NotTraced(f"{func}")
        if decomposes(func, devices) and not whole:
            raise NotTraced(f"{func}")
        with self.mode:
            result = func(*args, **kwargs)
        if func._schema.is_mutable:
            written = [a.alias_info is not None for a in func._schema.arguments]
            first = given[0] if given and args and args[0] is given[0].tensor else None
            if first is None or result is not first.tensor or any(written[1:]):
                raise NotTraced(f"{func} writes")
            if _kind(result) != first.kind:
                raise NotTraced(f"{func} lays a tensor otherwise")
            return _Result(first.kind, 0, itself=True)
        return self._learn(result, [storage_key(known.tensor) for known in given], given)

    def _learn(self, value: Any, storages: list[int], given: list[_Known]) -> Any:
        """The description from which a result is rebuilt. storages: of the arguments, then of the
        results so far."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._learn(v, storages, given) for v in value)
        if not isinstance(value, torch.Tensor):
            if type(value) not in _NUMBERS:
                raise NotTraced(f"a result that is a {type(value).__name__}")
            return value
        kind, storage = _kind(value), storage_key(value)
        owners = {id(known.tensor): i for i, known in enumerate(given) if storages[i] == storage}
        if len(owners) > 1 or id(value) in owners or storage in storages[len(given) :]:
            raise NotTraced("memory that is shared in another way")
        if not owners:
            storages.append(storage)
            kind = kind._replace(offset=0)  # as in the metadata that torch's own traces have
            return _Result(kind._replace(bytes=_bytes(kind)), None)
        (of,) = owners.values()
        return _Result(kind, of)

    def _give(self, built: Any, node: fx.Node, given: list[_Known]) -> Any:
        """New tensors for a call's node, as the call returns them; of several each has a node."""
        said = fx_traceback.current_meta
        node.meta.update((k, said[k]) for k in _KEPT if said.get(k) is not None)
        if not isinstance(built, _Result):
            collected = []
            for number, one in enumerate(built):
                call = self.graph.create_node(
                    "call_function", getitem, (node, number), {}, "getitem"
                )
                built_here = isinstance(one, (_Result, tuple, list))
                collected.append(self._give(one, call, given) if built_here else one)
            node.meta["val"] = type(built)(self._shown(item) for item in collected)
            return type(built)(collected)
        kind = built.kind
        if built.of is None:
            like = self._like(kind)
        elif built.itself:
            self._keep(given[built.of].tensor, node, kind, given[built.of].like)
            return given[built.of].tensor
        else:
            like = _viewed(given[built.of].like, kind)
        tensor = FakeTensor(self.mode, like, kind.device)
        self._keep(tensor, node, kind, like)
        return tensor

    def _keep(self, tensor: Any, node: fx.Node, kind: _Kind, like: torch.Tensor) -> None:
        self._known[id(tensor)] = _Known(tensor, node, kind, like)
        node.meta["val"] = self._shown(tensor)

    def _shown(self, value: Any) -> Any:
        """The value for a node's metadata: fake tensors of the same storage, without autograd
        history."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._shown, value))
        if not isinstance(value, torch.Tensor):
            return value
        known = self.known(value)
        return FakeTensor(self.mode, known.like, known.kind.device)

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.known(value).node
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._nodes, value))
        if isinstance(value, dict):
            return {k: self._nodes(v) for k, v in value.items()}
        return value

    @staticmethod
    def _like(kind: _Kind) -> torch.Tensor:
        return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")


def _by_values(func: Any, given: Sequence[_Known]) -> bool:
    """Whether the result of a call depends on the values in its arguments."""
    if func is torch.ops.aten.index.Tensor:  # by row numbers, not by a mask
        return any(known.kind.dtype in _MASKS for known in given[1:])
    said = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return any(tag in func.tags for tag in said)


def _viewed(of: torch.Tensor, kind: _Kind) -> torch.Tensor:
    """A view, also in another dtype: of complex numbers as real ones, for one."""
    if of.dtype == kind.dtype:
        return of.as_strided(kind.shape, kind.stride, kind.offset)
    empty = torch.empty(0, dtype=kind.dtype, device=of.device)
    return empty.set_(of.untyped_storage(), kind.offset, kind.shape, kind.stride)


def _bytes(kind: _Kind) -> int:
    """Size of the storage that `torch.empty_strided` allocates."""
    if 0 in kind.shape:
        return 0
    last = sum((n - 1) * step for n, step in zip(kind.shape, kind.stride, strict=True))
    return (last + 1) * kind.dtype.itemsize
