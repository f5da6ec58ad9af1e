"""Programs of stages as text, and what they compute.

    forward(parameter w, batch #0) -> (loss, saved t)
    %w: f64[4,3] = input
    ...
    return (%mean, %t)
    backward(...) -> (gradient w)
    ...

Each phase is a heading with the kinds and names of its inputs and results, then its graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.ir.parse import parse_graph
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.text import graph_text
from graphaccel.kernels import host_copy  # noqa: F401  # it defines ops
from graphaccel.passes.context import graphs_of

_HEADING = re.compile(r"(prepare|forward|backward[ \w]*|weight[ \w]*|head)\((.*)\) -> \((.*)\)")


def program_of(text: str, stage: int = 0) -> StageProgram:
    """The program of a stage that a text states; its parameters are those that it reads."""
    parts = re.split(r"^(?=\w+[ \w]*\(.*\) -> \()", text, flags=re.MULTILINE)
    phases, mode = {}, FakeTensorMode()
    for part in filter(str.strip, parts):
        heading, _, graph = part.partition("\n")
        found = _HEADING.fullmatch(heading)
        assert found is not None, heading
        values = [tuple(map(_value, filter(None, found[i].split(", ")))) for i in (2, 3)]
        phases[found[1]] = parse_graph(graph, mode), *values
    forward, backward = phases["forward"], phases["backward first last"]
    read = (*forward[1], *backward[1])
    names = dict.fromkeys(v.name for v in read if v.kind == "parameter")
    return StageProgram(
        stage, forward[0], forward[1], forward[2], {(True, True): backward[0]}, backward[1],
        backward[2], parameters=tuple(names),
    )  # fmt: skip


def text_of(program: StageProgram) -> str:
    """What `program_of` reads, with every phase and its notes."""
    kinds = {
        "prepare": (program.prepare_inputs, program.prepare_outputs),
        "forward": (program.forward_inputs, program.forward_outputs),
        "backward": (program.backward_inputs, program.backward_outputs),
        "weight": (program.weight_inputs, program.weight_outputs),
        "head": (program.head_inputs, program.head_outputs),
    }
    found = []
    for name, graph in graphs_of(program).items():
        inputs, outputs = (", ".join(map(_said, v)) for v in kinds[name.split()[0]])
        text = graph_text(graph.graph, notes=True)
        found.append(f"{name}({inputs}) -> ({outputs})\n{text}")
    return "".join(found)


def _said(value: Value) -> str:
    leaf = f"#{value.leaf}" if value.leaf >= 0 else ""
    return " ".join(filter(None, (value.kind, value.name, leaf)))


def _value(text: str) -> Value:
    kind, *rest = text.split()
    leaf = next((int(r[1:]) for r in rest if r.startswith("#")), -1)
    return Value(kind, next((r for r in rest if not r.startswith("#")), ""), leaf=leaf)


def values_of(graph: fx.GraphModule, seed: int = 0) -> list[Tensor]:
    """A random float64 tensor for each input, the same for equal names and shapes."""
    found = []
    for node in graph.graph.find_nodes(op="placeholder"):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, node.name)))
        shape = node.meta["val"].shape
        found.append(torch.randn(*shape, generator=generator, dtype=torch.float64))
    return found


def computed(program: StageProgram, held: Mapping[str, Any]) -> dict[str, Tensor]:
    """What one microbatch gives, by kind and name. held: by kind and name, whatever is neither
    saved nor prepared."""
    known = dict(held)
    for graph, inputs, outputs in _order(program):
        given = [known[_said(value)] for value in inputs]
        results: Sequence[Tensor] = graph(*given)
        known |= {_said(value): result for value, result in zip(outputs, results, strict=True)}
    return {name: value for name, value in known.items() if name not in held}


def _order(program: StageProgram) -> list[tuple[fx.GraphModule, Any, Any]]:
    phases = []
    if program.prepare is not None:
        phases.append((program.prepare, program.prepare_inputs, program.prepare_outputs))
    phases.append((program.forward, program.forward_inputs, program.forward_outputs))
    (backward,) = program.backwards.values()
    return [*phases, (backward, program.backward_inputs, program.backward_outputs)]


def assert_same_results(
    before: StageProgram, after: StageProgram, held: Mapping[str, Tensor], kinds: Sequence[str]
) -> None:
    """Both give the same bits for every result of these kinds."""
    first, second = computed(before, held), computed(after, held)
    wanted = {name for name in first if name.split()[0] in kinds}
    assert wanted
    for name in wanted:
        assert torch.equal(first[name], second[name]), name


LINEAR = """\
forward(parameter w, batch #0) -> (loss, saved relu)
%w: f64[4,3] = input
%x: f64[5,4] = input
%mm: f64[5,3] = aten.mm(%x, %w)    # forward a
%relu: f64[5,3] = aten.relu(%mm)    # forward
%sum_1: f64[] = aten.sum(%relu)    # forward
return (%sum_1, %relu)
backward first last(batch #0, saved relu) -> (gradient w)
%x: f64[5,4] = input
%relu: f64[5,3] = input
%ones_like: f64[5,3] = aten.ones_like(%relu)    # backward
%threshold_backward: f64[5,3] = aten.threshold_backward(%ones_like, %relu, 0)    # backward
%t: f64[4,5] = aten.t(%x)    # backward a
%mm_1: f64[4,3] = aten.mm(%t, %threshold_backward)    # backward a
return (%mm_1)
"""
"""A layer and its gradient: sum(relu(x @ w))."""


def held_by_linear() -> dict[str, Tensor]:
    """The parameter and the batch of LINEAR."""
    w, x = values_of(program_of(LINEAR).forward)
    return {"parameter w": w, "batch #0": x}


def joint(text: str) -> fx.GraphModule:
    """The joint graph that a text states; every node computes the forward node of its own name."""
    module = parse_graph(text)
    for node in module.graph.nodes:
        node.meta["origin"] = node.name
    return module


def text_of_graph(module: fx.GraphModule) -> str:
    """A graph with its notes."""
    return graph_text(module.graph, notes=True)


def assert_same_bits(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Both give the same bits on the same random inputs."""
    given = values_of(before)
    for one, other in zip(before(*given), after(*given), strict=True):
        assert torch.equal(one, other)
