"""Cast float32 parameters to 16 bits once a step instead of once in every microbatch.

before (forward and backward of w [64, 32])    after
  %w: f32[64,32] = input                         prepare, once a step, before the first microbatch:
  %c: bf16[64,32] = aten._to_copy(%w)              %w: f32[64,32] = input
  %y: = aten.mm(%x, %c)                            %low: bf16[64,32] = aten._to_copy(%w)
                                                   return (%low)
                                                 each microbatch:
                                                   %w: bf16[64,32] = input
                                                   %y: = aten.mm(%x, %w)

The parameters do not change: the optimizer, checkpoints and float32 readers see no copy, and a
weight that a script changes between steps is cast anew (Micikevicius et al., Mixed Precision
Training, 2018, §3.1: one copy of the master weights a step). A parameter that ZeRO 3 gathers is no
longer an input of the graph: `gather_once` casts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import StageProgram, Value
from graphaccel.passes.parameters.parameter_groups import casts_to
from graphaccel.planner.plan.plan import Plan


def cast_parameters_once(program: StageProgram, plan: Plan) -> StageProgram:
    """The program whose microbatches read casts ("held") that its `prepare` graph makes of
    parameters.

    Without a backward, or without casts of parameters to the plan's precision, it is unchanged.
    """
    if not plan.holds_casts or not program.backward_outputs:
        return program
    low = getattr(torch, plan.precision.compute)
    (graph,) = program.backwards.values()
    forward = _held(program.forward, program.forward_inputs, low)
    backward = _held(graph, program.backward_inputs, low)
    like = {**backward.like, **forward.like}
    if not like:
        return program
    names = [n for n in program.parameters if n in like]
    return replace(
        program,
        forward_inputs=forward.inputs,
        backward_inputs=backward.inputs,
        prepare=_prepare(program.forward, [like[n] for n in names], low),
        prepare_inputs=tuple(Value("parameter", n) for n in names),
        prepare_outputs=tuple(Value("held", n) for n in names),
    )


@dataclass(frozen=True)
class _Like:
    """A parameter's placeholder before the rewrite. module: of the parameter."""

    name: str
    value: torch.Tensor
    module: str


@dataclass(frozen=True)
class _Phase:
    inputs: tuple[Value, ...]
    like: dict[str, _Like]


def _held(module: fx.GraphModule, values: Sequence[Value], low: torch.dtype) -> _Phase:
    """Rewrite a graph of a microbatch in place. A parameter that is also read in float32 stays an
    input, and its cast is a further input after it."""
    inputs: list[Value] = []
    like: dict[str, _Like] = {}
    nodes = module.graph.find_nodes(op="placeholder")
    for node, value in zip(nodes, values, strict=True):
        casts = [u for u in node.users if value.kind == "parameter" and casts_to(u, low)]
        if not casts:
            inputs.append(value)
            continue
        whole = node.meta["val"]
        like[value.name] = _Like(node.name, whole, value.name.rpartition(".")[0])
        here, held = node, Value("held", value.name)
        if len(casts) < len(node.users):
            with module.graph.inserting_after(node):
                here = module.graph.placeholder(f"{node.name}_low")
            here.meta = dict(node.meta)
            inputs.append(value)
        here.meta["val"] = casts[0].meta["val"]
        inputs.append(held)
        for cast in casts:
            cast.replace_all_uses_with(here)
            module.graph.erase_node(cast)
    module.graph.lint()
    module.recompile()
    return _Phase(tuple(inputs), like)


def _prepare(module: fx.GraphModule, like: Sequence[_Like], low: torch.dtype) -> fx.GraphModule:
    """The graph that runs once a step: a cast of each parameter."""
    graph = fx.Graph()
    given = []
    for each in like:
        given.append(graph.placeholder(each.name))
        given[-1].meta = {"val": each.value, "phase": "input", "module": each.module}
    built = []
    for node, each in zip(given, like, strict=True):
        cast = torch.ops.aten._to_copy.default
        built.append(graph.create_node("call_function", cast, (node,), {"dtype": low}, "low"))
        built[-1].meta = {"val": each.value.to(low), "phase": "forward", "module": each.module}
        built[-1].meta["made_by"] = "cast_parameters_once"
    graph.output(built)
    graph.lint()
    return graph_module(module, graph)
