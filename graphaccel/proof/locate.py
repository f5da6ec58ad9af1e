"""Finds the first node of a captured graph whose value eager code never has.

Both are run with every value reduced to a few sums, which do not depend on layout. A node is right
if eager had its value, or if a node computed from it is right: canonical forms have intermediate
values that eager code does not have. The first node that is not right is the result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from graphaccel.capture.differentiate import FRAME
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.errors.messages import Location
from graphaccel.ir.replication.unfold import input_nodes
from graphaccel.ir.values import tensors_of
from graphaccel.proof.comparison import Pair, Setting

_WITHOUT_VALUES = ("zeros_like", "ones_like", "full_like", "empty_like", "new_")
"""Ops that read only the shape of a tensor: their results say nothing about its values."""

Sums = tuple[float, float, float]


@dataclass(frozen=True)
class Difference:
    """A node of the graph. op: what it calls. phase: "forward" or "backward". module: path in the
    model. location: the user's source line, where known."""

    node: str
    op: str
    phase: str
    module: str
    location: Location | None

    def __str__(self) -> str:
        where = f" in `{self.module}`" if self.module else ""
        line = f", {self.location}" if self.location else ""
        return f"{self.node} ({self.op}, {self.phase}){where}{line}"


def locate(pair: Pair, setting: Setting) -> Difference | None:
    """The first node that differs from eager; None where eager has every value, as where an output
    is missing."""
    eager = _Values()
    graph: dict[fx.Node, list[tuple[int, Sums]]] = {}

    def observe(node: fx.Node, value: Any) -> None:
        graph[node] = [s for t in tensors_of(value) if (s := _sums(t)) is not None]

    pair.run(setting, observe, lambda: _Watched(eager))
    tolerance = 1e-8 if setting.wide else 1e-4
    known = {n for n, built in graph.items() if any(eager.has(*one, tolerance) for one in built)}
    right: set[fx.Node] = set()
    for node in reversed(list(graph)):
        # Zeros that eager also has say nothing about what they were computed from.
        counted = node in known and any(sums[1] for _, sums in graph[node])
        if counted or any(u in right and not _reads_shape(u) for u in node.users):
            right.add(node)
    for node, built in graph.items():
        if node.op == "call_function" and built and node not in right and node not in known:
            return difference_at(pair, node)
    return _constant(pair)


def difference_at(pair: Pair, node: fx.Node) -> Difference:
    """The description of a node."""
    return Difference(
        node.name,
        str(node.target),
        node.meta.get("phase", ""),
        node.meta.get("module", ""),
        _location(pair, node),
    )


def _location(pair: Pair, node: fx.Node) -> Location | None:
    """The innermost source line outside of torch that a node stems from."""
    origin = node.meta.get("origin")
    forward = pair.step.forward.graph.graph
    trace = next((n.meta.get("stack_trace") for n in forward.nodes if n.name == origin), None)
    lines = [(file, int(number)) for file, number in FRAME.findall(trace or "")]
    own = [line for line in lines if not line[0].startswith(tuple(torch.__path__))]
    line = own[-1] if own else node.meta.get("location")
    if not line:
        return None
    file, number = line
    return Location(file, number)


def _constant(pair: Pair) -> Difference | None:
    """The first user of a constant whose value equals a parameter's."""
    parameters = list(pair.subject.model.parameters())
    step = pair.step
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        if spec.kind == "constant" and node.users:
            value = step.forward.constants[spec.name]
            if any(p.shape == value.shape and bool((p.cpu() == value).all()) for p in parameters):
                return difference_at(pair, next(iter(node.users)))
    return None


def _reads_shape(node: fx.Node) -> bool:
    name = getattr(node.target, "_schema", None)
    return name is not None and name.name.split("::")[1].startswith(_WITHOUT_VALUES)


class _Values:
    """The sums of every value in eager code."""

    def __init__(self) -> None:
        self._found: dict[int, list[Sums]] = defaultdict(list)
        self._arrays: dict[int, np.ndarray] = {}

    def add(self, value: Any) -> None:
        for tensor in tensors_of(value):
            sums = _sums(tensor)
            if sums is not None:
                self._found[sums[0]].append(sums[1])

    def has(self, count: int, sums: Sums, tolerance: float) -> bool:
        """Whether eager had a value with this number of elements and these sums."""
        if count not in self._found:
            return False
        if count not in self._arrays:
            self._arrays[count] = np.array(self._found[count])
        known = self._arrays[count]
        scale = np.array([sums[1], sums[1], sums[2]])
        return bool((np.abs(known - np.array(sums)) <= tolerance * scale).all(axis=1).any())


class _Watched(TorchDispatchMode):
    """Records the sums of every value in eager code."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op."""
        result = func(*args, **(kwargs or {}))
        self._values.add(result)
        return result


def _sums(tensor: Tensor) -> tuple[int, Sums] | None:
    """(number of elements, (their sum, that of their magnitudes, that of their squares)); None
    where the values are not finite floating-point numbers."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    wide = tensor.detach().double()
    sums = float(wide.sum()), float(wide.abs().sum()), float(wide.square().sum())
    return (tensor.numel(), sums) if np.isfinite(sums).all() else None
