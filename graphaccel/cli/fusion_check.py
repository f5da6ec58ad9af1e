"""Checks a fusion: its numerical results, its patterns and its sharding rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.ir.values import op_of as called_by
from graphaccel.kernels.check.cases import DTYPES
from graphaccel.kernels.check.numbers import Fault, check_numbers
from graphaccel.kernels.examples import example
from graphaccel.kernels.register import backward_of, op_of, parameters, tensors
from graphaccel.kernels.spec import Function, Fusion, Scalar
from graphaccel.passes.fusion.fuse import find_sites, fuse
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.rules.notation import tensor_arguments
from graphaccel.sharding.rules.table import rule_of


@dataclass(frozen=True)
class Checked:
    """cases: calls compared. patterns, negatives: how many were tried, over the dtypes."""

    name: str
    cases: int
    patterns: int
    negatives: int
    indices: int
    faults: tuple[Fault, ...]


def check(fusion: Fusion) -> Checked:
    """All checks, on this machine's CPU and, where there is one, its GPU."""
    cases, faults = check_numbers(fusion)
    if torch.cuda.is_available():
        more, others = check_numbers(fusion, "cuda")
        cases, faults = cases + more, (*faults, *others)
    patterns, negatives, wrong = check_patterns(fusion)
    indices, broken = (0, ()) if fusion.rewrite is not None else check_rule(fusion)
    return Checked(fusion.name, cases, patterns, negatives, indices, (*faults, *wrong, *broken))


class _Calls(nn.Module):
    """A model that computes a pattern, and a loss of its outputs."""

    def __init__(self, pattern: Function, names: tuple[str, ...], numbers: dict[str, Any]) -> None:
        super().__init__()
        self._pattern, self._names, self._numbers = pattern, names, numbers
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *given: Tensor) -> Tensor:
        values = dict(zip(self._names, given, strict=True))
        built = tensors(self._pattern(**values, **self._numbers))
        return torch.stack([m.sum().float() * self.scale for m in built]).sum()


def _step(fusion: Fusion, pattern: Function, dtype: torch.dtype) -> StepGraph:
    values = example(fusion, dtype)
    names = parameters(pattern)
    given = [n for n in names if isinstance(values[n], Tensor)]
    numbers = {n: _telling(fusion.scalars[n]) for n in names if n not in given}
    model = _Calls(pattern, tuple(given), numbers)
    return capture(model, flatten_call(*as_call(tuple(values[n] for n in given))), symbolic=False)


def _telling(spec: Scalar) -> Any:
    """A value for a number that is visible in a graph: a factor of one is not."""
    return next((v for v in (spec.default, *spec.examples) if v != 1), spec.default)


def check_patterns(
    fusion: Fusion, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> tuple[int, int, tuple[Fault, ...]]:
    """Each pattern is matched once, in every dtype; no negative is; fusing twice changes nothing
    more."""
    faults = []
    total = 0
    plan = Plan(1, fusions=(fusion.name,))
    for i, pattern in enumerate(fusion.patterns):
        for dtype in dtypes:
            case = f"pattern {i}, {str(dtype).removeprefix('torch.')}"
            step = _step(fusion, pattern, dtype)
            finder, sites = find_sites(step, (fusion,))
            if len(sites) != 1:
                near = finder.near.get(fusion.name)
                why = f"{near.matched} of {near.size} calls, {near.reason}" if near else "no start"
                faults.append(Fault(f"it does not find its own pattern: {why}", case))
                continue
            total += 1
            once = fuse(step, plan)
            if fuse(once, plan).text() != once.text():
                faults.append(Fault("fused twice, the graph changes again", case))
    for i, pattern in enumerate(fusion.negatives):
        _, sites = find_sites(_step(fusion, pattern, torch.float32), (fusion,))
        if sites:
            faults.append(Fault("it matches what it must not", f"negative {i}"))
    return total, len(fusion.negatives), tuple(faults)


def check_rule(fusion: Fusion) -> tuple[int, tuple[Fault, ...]]:
    """Each index that may be sharded: computed unsharded, and in two shards."""
    sizes = {i: 8 for t in fusion.tensors.values() for i in t.indices if i != "..."}
    sizes |= {n: max(s) // 4 * 4 or 4 for n, s in fusion.sizes.items()}
    values = example(fusion, torch.float64, sizes, leading=(4, 6))
    if fusion.random:  # with dropout 0: halves draw other numbers than the whole
        values["p"] = 0.0
    faults = []
    count = 0
    for node in _calls(fusion, values):
        rule = rule_of(node)
        assert rule is not None
        every = {i for names in rule.inputs for i in names} - rule.whole - {"", "1"}
        for index in sorted(every):
            count += 1
            wrong = _by_shards(node, index)
            if wrong:
                faults.append(Fault(f"sharding `{index}` changes {wrong}", str(node.target)))
    return count, tuple(faults)


def _calls(fusion: Fusion, values: dict[str, Any]) -> Iterator[fx.Node]:
    """The forward and the backward op as nodes with values."""
    op = op_of(fusion)
    forward = _node(op, list(values.values()))
    yield forward
    if not fusion.differentiable or fusion.inline:
        return
    known = {**values, **dict(zip(fusion.results, tensors(forward.meta["val"]), strict=True))}
    known |= {f"grad_{n}": torch.randn_like(known[n]) for n in fusion.outputs}
    known["wanted"] = [True] * len(fusion.inputs)
    yield _node(backward_of(fusion), [known[n] for n in fusion.read_back])


def _node(op: Any, values: list[Any]) -> fx.Node:
    graph = fx.Graph()
    args = []
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            args.append(graph.placeholder(f"x{i}"))
            args[-1].meta["val"] = value
        else:
            args.append(value)
    node = graph.call_function(op, tuple(args))
    node.meta["val"] = op(*values)
    return node


def _by_shards(node: fx.Node, index: str) -> str:
    """What differs when an index is computed in two halves; empty if nothing does."""
    rule = rule_of(node)
    assert rule is not None
    places = {id(n): i for i, n in enumerate(tensor_arguments(node))}
    parts = []
    for half in range(2):
        args = []
        for value in node.args:
            if not isinstance(value, fx.Node):
                args.append(value)
                continue
            names, tensor = rule.inputs[places[id(value)]], value.meta["val"]
            if index in names:
                tensor = tensor.chunk(2, names.index(index))[half].contiguous()
            args.append(tensor)
        parts.append(tensors(called_by(node)(*args)))
    whole = tensors(node.meta["val"])
    for i, (names, wanted) in enumerate(zip(rule.outputs, whole, strict=True)):
        left, right = parts[0][i], parts[1][i]
        got = torch.cat([left, right], names.index(index)) if index in names else left + right
        if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=1e-9, atol=1e-11):
            return f"result {i}"
    return ""
