"""Split a stage's backward: gradients of activations first, gradients of weights apart.

before                                        after: backward            and weight
  %dx: f32[8,64] = aten.mm(%dy, %w)             %dx = aten.mm(%dy, %w)     %t = aten.t(%dy)
  %t: f32[32,8] = aten.t(%dy)                   return (%dx, %dy, %x)      %dw = aten.mm(%t, %x)
  %dw: f32[32,64] = aten.mm(%t, %x)                                        return (%dw,)
  return (%dx, %dw)

Other stages wait for the activation gradients alone, so that a schedule can compute the weight
gradients where a rank would be idle (Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241, section 2). What the weight part reads of either phase is "saved" for it by the
backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import getitem

from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.values import returned
from graphaccel.planner.plan.plan import Plan

_PASSING = ("saved", "received")  # inputs of a backward that are freed once it has run


def split_weights(
    programs: Sequence[StageProgram], plan: Plan
) -> tuple[tuple[StageProgram, ...], tuple[StageProgram, ...]]:
    """(the programs with their backward alone, the same with the weight part as their backward).

    Nothing is split, and the second is empty, where the plan's schedule has no separate weight
    actions.
    """
    if plan.schedule != "zero_bubble":
        return tuple(programs), ()
    pairs = [_split(program) for program in programs]
    return tuple(b for b, _ in pairs), tuple(w for _, w in pairs)


def with_weights(program: StageProgram, weights: StageProgram) -> StageProgram:
    """The program joined with a weight part that further passes have finished."""
    return replace(
        program,
        weights=weights.backwards,
        weight_inputs=weights.backward_inputs,
        weight_outputs=weights.backward_outputs,
        buckets=weights.buckets,
    )


def _split(program: StageProgram) -> tuple[StageProgram, StageProgram]:
    module = program.backwards[(True, True)]
    results = list(zip(returned(module), program.backward_outputs, strict=True))
    early = _ancestors(n for n, v in results if v.kind != "gradient")
    for node in module.graph.nodes:  # several results of one call stay together
        if node.target is getitem and node.args[0] in early:
            early.add(node)
    given = dict(
        zip(module.graph.find_nodes(op="placeholder"), program.backward_inputs, strict=True)
    )
    late = _ancestors((n for n, v in results if v.kind == "gradient"), stop=early)
    reads = [n for n in module.graph.nodes if n in late and (n in early or n in given)]
    held = {n: given[n] for n in reads if n in given and given[n].kind not in _PASSING}
    kept = {n: _kept(n, given.get(n)) for n in reads if n not in held}

    backward = [(n, v) for n, v in results if v.kind != "gradient"]
    weight = [(n, v) for n, v in results if v.kind == "gradient"]
    used = early | set(kept)
    inputs = [(n, v) for n, v in given.items() if n in used or v.kind in _PASSING]
    own = [n for n in module.graph.nodes if n in early and n not in given and n.op != "output"]
    rest = [n for n in module.graph.nodes if n in late and n not in early and n not in given]
    return (
        _with(program, module, inputs, own, [*backward, *kept.items()]),
        _with(program, module, [*held.items(), *kept.items()], rest, weight),
    )


def _kept(node: fx.Node, value: Value | None) -> Value:
    name = f"kept_{node.name}" if value is None else value.name
    return Value("saved", name)


def _ancestors(nodes: Iterable[fx.Node], stop: set[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes and all that they depend on; nodes in `stop` are included, their inputs are not."""
    collected: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in collected:
            collected.add(node)
            if stop is None or node not in stop:
                stack += node.all_input_nodes
    return collected


def _with(
    program: StageProgram,
    module: fx.GraphModule,
    inputs: Sequence[tuple[fx.Node, Value]],
    body: Sequence[fx.Node],
    outputs: Sequence[tuple[fx.Node, Value]],
) -> StageProgram:
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    for node, _ in inputs:
        built[node] = graph.placeholder(node.name)
        built[node].meta = dict(node.meta)
    for node in body:
        built[node] = graph.node_copy(node, lambda n: built[n])
    graph.output([built[n] for n, _ in outputs]).meta["phase"] = "output"
    return replace(
        program,
        backwards={(True, True): graph_module(module, graph)},
        backward_inputs=tuple(v for _, v in inputs),
        backward_outputs=tuple(v for _, v in outputs),
    )
