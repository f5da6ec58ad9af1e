"""Find stages that are equal up to names, so that the passes rewrite only one of them.

Two stages are equal where both phases have the same calls on the same shapes, read and return the
same kinds of values in the same order, and what the plan says of their parameters is the same. The
passes after `split_phases` look at nothing else of a stage, so their results are equal too. The
last stage is never a copy: it is treated in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.program import Value
from graphaccel.ir.replication.layers import with_places
from graphaccel.passes.stages.outline_stages import Outline, StageOutline

_COMPARED = ("phase", "made_by", "bind", "scratch")  # what passes read of a node besides its call
_NAMED = ("constant", "parameter", "buffer", "gradient")  # kinds named after a parameter


@dataclass(frozen=True)
class EqualStage:
    """A stage that equals stage `like` under other names.

    nodes: of the joint graph, those of `like` → its own. named: parameters, buffers and constants;
    modules: paths. values: what is sent to other stages or received from them.
    """

    outline: StageOutline = field(repr=False)
    like: int
    nodes: Mapping[fx.Node, fx.Node] = field(repr=False)
    named: Mapping[str, str] = field(repr=False)
    modules: Mapping[str, str] = field(repr=False)
    values: Mapping[Value, Value] = field(repr=False)


def equal_stages(
    outlines: Sequence[StageOutline], described: Callable[[str], object]
) -> dict[int, EqualStage]:
    """Stage → its correspondence to an equal, earlier stage; stages without one are left out.

    described: parameter → what is known of it besides its value.
    """
    equal: dict[int, EqualStage] = {}
    first: dict[Any, list[StageOutline]] = {}
    for outline in outlines[:-1]:
        like = first.setdefault(_sizes(outline), [])
        match = next(filter(None, (_equal(other, outline, described) for other in like)), None)
        if match is None:
            like.append(outline)
        else:
            equal[outline.stage] = match
    return equal


def _sizes(outline: StageOutline) -> tuple[int, ...]:
    phases = (outline.forward, outline.backward)
    counts = (len(each) for p in phases for each in (p.inputs, p.body, p.outputs))
    return (*counts, len(outline.parameters), len(outline.buffers))


def _equal(
    like: StageOutline, outline: StageOutline, described: Callable[[str], object]
) -> EqualStage | None:
    comparison = _Comparison(described)
    same = (
        comparison.phases(like.forward, outline.forward)
        and comparison.phases(like.backward, outline.backward)
        and all(map(comparison.parameter, like.parameters, outline.parameters))
        and all(map(comparison.parameter, like.buffers, outline.buffers))
    )
    if not same:
        return None
    return EqualStage(
        outline,
        like.stage,
        comparison.nodes,
        comparison.named,
        comparison.modules,
        comparison.values,
    )


class _Comparison:
    """Correspondence of the names of two stages, built up while they are compared."""

    def __init__(self, described: Callable[[str], object]) -> None:
        self.described = described
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.named: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        self.values: dict[Value, Value] = {}
        self.blocks: dict[str, str] = {}
        self._back: dict[int, dict[Any, Any]] = {}

    def pair(self, known: dict[Any, Any], a: Any, b: Any) -> bool:
        """Whether `a` always corresponds to `b`, and nothing else does."""
        back = self._back.setdefault(id(known), {})
        return known.setdefault(a, b) == b and back.setdefault(b, a) == a

    def phases(self, a: Outline, b: Outline) -> bool:
        """Whether two phases are equal."""
        gradients = [node for node, v in a.outputs if v.kind == "gradient"]
        return (
            len(set(gradients)) == len(gradients)  # two of one node differ by name only
            and all(self.given(*x, *y) for x, y in zip(a.inputs, b.inputs, strict=True))
            and all(map(self.call, a.body, b.body))
            and all(
                self.nodes.get(x) is y and self.value(v, w)
                for (x, v), (y, w) in zip(a.outputs, b.outputs, strict=True)
            )
        )

    def given(self, a: fx.Node, v: Value, b: fx.Node, w: Value) -> bool:
        """Whether two inputs are equal."""
        return self.pair(self.nodes, a, b) and self.value(v, w) and _types(a) == _types(b)

    def value(self, v: Value, w: Value) -> bool:
        """Whether two inputs or outputs correspond."""
        if (v.kind, v.leaf, v.batch_dim) != (w.kind, w.leaf, w.batch_dim):
            return False
        if v.kind in _NAMED:
            return self.parameter(v.name, w.name)
        if v.kind == "saved":
            return True
        if v.kind in ("sent", "received"):
            return len(v.peers) == len(w.peers) and self.pair(self.values, v, w)
        return v == w

    def parameter(self, a: str, b: str) -> bool:
        """Whether two parameters are treated in the same way."""
        return self.pair(self.named, a, b) and self.described(a) == self.described(b)

    def call(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes make the same call on corresponding inputs."""
        if a.target is not b.target or any(a.meta.get(k) != b.meta.get(k) for k in _COMPARED):
            return False
        (call, reads), (other, others) = (
            with_places((a.args, a.kwargs)),
            with_places((b.args, b.kwargs)),
        )
        if len(reads) != len(others) or repr(call) != repr(other):
            return False
        if not all(self.nodes.get(x) is y for x, y in zip(reads, others, strict=True)):
            return False
        here, there = a.meta.get("module", ""), b.meta.get("module", "")
        return (
            self.pair(self.nodes, a, b)
            and self.pair(self.modules, here, there)
            and self.pair(self.blocks, block_of(here), block_of(there))
            and _types(a) == _types(b)
        )


def _types(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return [
        (t.dtype, tuple(t.shape), t.stride(), t.device) if isinstance(t, torch.Tensor) else t
        for t in (value if isinstance(value, (tuple, list)) else (value,))
    ]
