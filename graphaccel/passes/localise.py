"""The graph of a plan's layout for the planner: sharded over its axes, sizes in examples.

The graph of two numbers of examples is sharded, and every size written as what passes through both
(`capture.symbols`). Where the two were sharded differently, sizes are those of the plan's own
microbatch, as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, attach_sizes, same_structure
from graphaccel.passes import shard_axes
from graphaccel.passes.exact_microbatch import exact_microbatch
from graphaccel.planner.layouts import LocalGraph
from graphaccel.planner.plan import Plan


def localised(
    step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None = None
) -> LocalGraph:
    """The step as each rank of the tensor, context and expert axes of `plan` runs it.

    sizes: symbol sizes of the batch, where they differ from the capture's.

    Raises BadPin (GA202) for placements that the graph does not allow.
    """

    def sharded(examples: int) -> shard_axes.LocalGraph:
        alone = replace(plan, data=1, microbatches=1, batch=examples)
        at = {**(sizes or {}), **({BATCH: examples} if BATCH in step.sizes else {})}
        return shard_axes.shard_axes(exact_microbatch(step, alone, at).graph, step, plan)

    few = 2 * plan.expert  # examples lie on the expert axis, one at least for each rank
    made = sharded(few if BATCH in step.sizes else step.batch_size)
    known: dict[sympy.Symbol, int] = {}
    others: list[tuple[sympy.Symbol, int, fx.GraphModule]] = []
    if BATCH in step.sizes:
        more = sharded(2 * few)
        if same_structure(made.graph, more.graph):
            known, others = {BATCH: few}, [(BATCH, 2 * few, more.graph)]
        else:
            made = sharded(plan.microbatch_size)
    attach_sizes(made.graph, known, others)
    local = replace(step, graph=made.graph, sizes=known, derived={})
    return LocalGraph(local, made.partial, made.guessed)
