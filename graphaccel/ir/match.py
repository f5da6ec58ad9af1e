"""Find occurrences of a small pattern graph in a large graph.

Both are canonical forward graphs with fake values. A pattern's placeholders match any value, its
numbers in `numbers` any number; additions and multiplications match in either operand order, and so
do the two dims of a transpose; a multiplication by such a number matches a division by its inverse.
Everything else must be the same op with the same arguments, and no value inside the match may be
read outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.ops import schema
from graphaccel.ir.text import target_text, type_text
from graphaccel.ir.values import operands

aten = torch.ops.aten
_COMMUTES = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.eq.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.logical_and.default,
    aten.bitwise_and.Tensor,
}
_VIEWS = {
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
}
_DIMS = {"dim", "dims", "dim0", "dim1"}
_NEW_DIM = {aten.unsqueeze.default, aten.stack.default}
# Sizes are compared once the pattern has been traced anew at the shapes of the match.
_SIZES = {"size", "shape", "start", "end", "split_size", "split_sizes", "normalized_shape"}
_WHEREABOUTS = {
    "device", "pin_memory", "layout", "memory_format", "non_blocking", "cudnn_enable",
}  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """What to match.

    graph: placeholders are named after the inputs they stand for; the output is a list of nodes,
    the
      last of which (the anchor) depends on all the others. numbers: literal → the input it stands
      for.
    """

    graph: fx.Graph = field(repr=False)
    numbers: Mapping[float, str]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes that the pattern returns."""
        return tuple(operands(self.graph.output_node())[0])

    @property
    def anchor(self) -> fx.Node:
        """The output at which matching starts."""
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        return max(self.outputs, key=lambda n: order[n])

    @property
    def size(self) -> int:
        """The number of its calls."""
        return sum(n.op == "call_function" for n in self.graph.nodes)


@dataclass(frozen=True)
class Match:
    """inputs: name → node or number. nodes: pattern node → node. free: those of them that depend on
    inputs only as views, and so may have readers outside."""

    inputs: Mapping[str, Any]
    nodes: Mapping[fx.Node, fx.Node] = field(repr=False)
    free: frozenset[fx.Node] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class Near:
    """A failed match: number of calls matched, where it stopped (a node's name) and why."""

    matched: int
    size: int
    node: str
    reason: str


def match_at(pattern: Pattern, anchor: fx.Node, *, sizes: bool = False) -> Match | Near:
    """Match a pattern with its anchor at a node. sizes: compare sizes too."""
    return _Search(pattern, sizes).run(anchor)


@dataclass
class _Search:
    pattern: Pattern
    sizes: bool
    best: Near | None = None

    def run(self, anchor: fx.Node) -> Match | Near:
        for bound in self._solve(((self.pattern.anchor, anchor),), {}):
            result = self._closed(bound)
            if isinstance(result, Match):
                return result
            self._note(bound, result[0], result[1])
        return self.best or Near(0, self.pattern.size, anchor.name, "another op")

    def _note(self, bound: Mapping[Any, Any], node: Any, reason: str) -> None:
        matched = sum(isinstance(k, fx.Node) and k.op == "call_function" for k in bound)
        if self.best is None or matched > self.best.matched:
            name = node.name if isinstance(node, fx.Node) else str(node)
            self.best = Near(matched, self.pattern.size, name, reason)

    def _closed(self, bound: Mapping[Any, Any]) -> Match | tuple[fx.Node, str]:
        nodes = {p: t for p, t in bound.items() if isinstance(p, fx.Node) and p.op != "placeholder"}
        inside = set(nodes.values())
        outputs = {nodes[o] for o in self.pattern.outputs if o in nodes}
        free: set[fx.Node] = set()
        for node in sorted(inside - outputs):  # in graph order
            if node.target in _VIEWS and not set(node.all_input_nodes) & (inside - free):
                free.add(node)
        for node in inside - outputs - free:
            for user in node.users:
                if user not in inside:
                    return node, f"{user.name} reads this value, which the fused op would not give"
        inputs = {p.name: t for p, t in bound.items() if isinstance(p, fx.Node) and p not in nodes}
        inputs |= {k: v for k, v in bound.items() if isinstance(k, str)}
        if any(value in inside for value in inputs.values() if isinstance(value, fx.Node)):
            return next(iter(inside)), "an input is made inside the pattern"
        return Match(inputs, nodes, frozenset(free))

    def _solve(
        self, goals: tuple[tuple[Any, Any], ...], bound: dict[Any, Any]
    ) -> Iterator[dict[Any, Any]]:
        """Every way to satisfy all goals (pairs of pattern value and value)."""
        if not goals:
            yield bound
            return
        (wanted, value), rest = goals[0], goals[1:]
        if isinstance(wanted, fx.Node):
            if wanted in bound:
                if bound[wanted] is value:
                    yield from self._solve(rest, bound)
                else:
                    self._note(bound, value, f"{wanted.name} stands for two different values")
                return
            if not isinstance(value, fx.Node):
                self._note(bound, value, "a number where a tensor is expected")
                return
            bound = {**bound, wanted: value}
            if wanted.op == "placeholder":
                if isinstance(value.meta.get("val"), torch.Tensor):
                    yield from self._solve(rest, bound)
                return
            for more in self._arguments(wanted, value, bound):
                yield from self._solve((*more, *rest), bound)
            return
        number = self._number(wanted)
        if number is not None:
            if isinstance(value, (int, float)) and bound.get(number, value) == value:
                yield from self._solve(rest, {**bound, number: value})
            return
        if isinstance(wanted, (list, tuple)) and isinstance(value, (list, tuple)):
            if len(wanted) == len(value):
                pairs = tuple(zip(wanted, value, strict=True))
                yield from self._solve((*pairs, *rest), bound)
            return
        if wanted == value and isinstance(wanted, bool) == isinstance(value, bool):
            yield from self._solve(rest, bound)

    def _number(self, value: Any) -> str | None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.pattern.numbers.get(value)
        return None

    def _arguments(
        self, wanted: fx.Node, node: fx.Node, bound: dict[Any, Any]
    ) -> Iterator[tuple[tuple[Any, Any], ...]]:
        """The goals that remain for two calls to be equal, in each legal operand order."""
        del bound[wanted]
        if _divides(wanted, node):
            bound[wanted] = node
            yield ((wanted.args[0], node.args[0]), (wanted.args[1], 1 / operands(node)[1]))
            return
        same = node.op == "call_function" and node.target is wanted.target
        if not same:
            result = type_text(node.meta.get("val")) if node.op != "call_function" else ""
            what = target_text(node.target) if node.op == "call_function" else f"an input {result}"
            self._note(bound, node, f"{what} where the pattern has {target_text(wanted.target)}")
            return
        left, right = _named(wanted), _named(node)
        pairs = []
        for name, value in left.items():
            other = right[name]
            if name in _WHEREABOUTS or (name in _SIZES and not self._compared(wanted)):
                continue
            if name in _DIMS:
                value, other = _from_the_end(wanted, value), _from_the_end(node, other)
            pairs.append((value, other))
        if wanted.target is aten.transpose.int:
            (source, *mine), (given, *theirs) = zip(*pairs, strict=True)
            pairs = [(source, given), *zip(sorted(mine), sorted(theirs), strict=True)]
        for a, b in pairs:
            if self._differ(a, b):
                self._note(bound, node, f"argument {_shown(b)} where the pattern has {_shown(a)}")
                return
        bound[wanted] = node
        yield tuple(pairs)
        if wanted.target in _COMMUTES:
            (a, x), (b, y), *others = pairs
            if isinstance(x, fx.Node) and isinstance(y, fx.Node):
                yield ((a, y), (b, x), *others)

    def _compared(self, wanted: fx.Node) -> bool:
        """Whether the call's sizes are compared: a reshape may have -1, and its result says it
        all."""
        return self.sizes and wanted.target is not aten.reshape.default

    def _differ(self, a: Any, b: Any) -> bool:
        """Whether two literals (not nodes, nor numbers to be bound) differ."""
        if isinstance(a, (fx.Node, list, tuple)) or self._number(a) is not None:
            return False
        return isinstance(b, fx.Node) or a != b or isinstance(a, bool) != isinstance(b, bool)


def _named(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, defaults filled in."""
    if not hasattr(node.target, "_schema"):
        return {str(i): a for i, a in enumerate(node.args)}
    known = schema(node)
    given = dict(zip((a.name for a in known), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in known}


def _from_the_end(node: fx.Node, dims: Any) -> Any:
    """Dims counted from the last one."""
    first = next((n for n in node.all_input_nodes if "val" in n.meta), None)
    if first is None or not isinstance(first.meta["val"], torch.Tensor):
        return dims
    rank = first.meta["val"].dim() + (node.target in _NEW_DIM)

    def one(dim: Any) -> Any:
        return (
            dim - rank if isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 else dim
        )

    return [one(d) for d in dims] if isinstance(dims, (list, tuple)) else one(dims)


def _divides(wanted: fx.Node, node: fx.Node) -> bool:
    """Whether the pattern has a multiplication by a number, and the node divides by one."""
    if wanted.target is not aten.mul.Tensor or node.target is not aten.div.Tensor:
        return False
    by, divisor = wanted.args[1], node.args[1]
    return isinstance(by, float) and isinstance(divisor, (int, float)) and divisor != 0


def _shown(value: Any) -> str:
    return f"%{value.name}" if isinstance(value, fx.Node) else str(value)
