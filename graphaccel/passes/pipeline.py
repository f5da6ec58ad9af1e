"""The passes in order, each with why it stands where it does.

lower_precision        on the forward graph: autograd then derives the casts of the backward
synchronise_batch_norm on the forward graph, before differentiation, for the same reason
drop_backward          evaluation: nothing to differentiate
(differentiate)        capture's, again, where one of these changed the forward graph
exact_microbatch       sizes shrink here: everything later sees one microbatch of one data rank
recompute              before the cut, so that a stage owns its clones
cut_stages             needs the final joint graph
split_phases           needs stages: what is saved is decided a stage at a time
accumulate_gradients   last: it brings in-place ops, after which nothing may be moved
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import BoxedCode
from graphaccel.ir.program import Prologue, StageProgram, StepProgram
from graphaccel.passes.accumulate_gradients import accumulate_gradients
from graphaccel.passes.cut_stages import StagedGraph, cut_stages
from graphaccel.passes.drop_backward import drop_backward
from graphaccel.passes.exact_microbatch import exact_microbatch
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.recompute import recompute
from graphaccel.passes.runner import Runner
from graphaccel.passes.split_phases import split_phases
from graphaccel.passes.synchronise_batch_norm import synchronise_batch_norm
from graphaccel.planner.plan import Plan
from graphaccel.rules.propagate import PARTIAL, is_random


def build(
    step: StepGraph,
    plan: Plan,
    *,
    sizes: Mapping[sympy.Symbol, int] | None = None,
    homes: Mapping[str, tuple[int, ...]] | None = None,
    gradients: bool = True,
) -> StepProgram:
    """Rewrite a captured step as the plan says: one program a stage.

    sizes: symbol sizes of the batch that will be passed, where they differ from the capture's.
    homes: stages of parameters that already lie somewhere. gradients: False for a forward alone.

    Raises: SplitRefused (GA207), TooManyStages (GA203).
    """
    run = Runner(plan)
    step = run.step("lower_precision", lower_precision, step)
    step = run.step("synchronise_batch_norm", synchronise_batch_norm, step)
    if not gradients:
        step = run.step("drop_backward", drop_backward, step)
    local = run.call("exact_microbatch", lambda: exact_microbatch(step, plan, sizes))
    run.dump("exact_microbatch", local.graph)
    graph = run.graph("recompute", lambda g: recompute(g, plan, step.positions), local.graph)
    staged = run.call(
        "cut_stages",
        lambda: cut_stages(graph, step.inputs, step.outputs, step.positions, plan.cuts, homes),
    )
    programs = run.call(
        "split_phases",
        lambda: split_phases(
            staged, step.inputs, step.outputs, step.batch_dims, keep_outputs=plan.outputs == "all"
        ),
    )
    programs = run.call(
        "accumulate_gradients", lambda: tuple(accumulate_gradients(p, plan) for p in programs)
    )
    for program in programs:
        run.dump(f"stage_{program.stage}_forward", program.forward)
        for (first, last), backward in program.backwards.items():
            moment = "_first" * first + "_last" * last
            run.dump(f"stage_{program.stage}_backward{moment}", backward)
    return _assembled(step, staged, programs, local.prologue, local.output_places)


def _assembled(
    step: StepGraph,
    staged: StagedGraph,
    programs: tuple[StageProgram, ...],
    prologue: Prologue | None,
    places: tuple,
) -> StepProgram:
    forward, backward = set(), set()
    for program in programs:
        for value in program.forward_inputs:
            if value.kind == "received":
                forward.add((value.peers[0], program.stage))
        for value in program.backward_inputs:
            if value.kind == "received":
                backward.add((value.peers[0], program.stage))
    loss = [p == PARTIAL for o, p in zip(step.outputs, places, strict=True) if o.kind == "loss"]
    return StepProgram(
        tuple(_boxed(p) for p in programs),
        None if prologue is None else replace(prologue, graph=_box(prologue.graph)),
        frozenset(forward),
        frozenset(backward),
        bool(loss and loss[0]),
        {name: at for name, at in staged.homes.items() if len(at) > 1},
        {o.leaf: p for o, p in zip(step.outputs, places, strict=True) if o.kind == "output"},
        any(is_random(n) for n in staged.graph.graph.nodes if n.op == "call_function"),
    )


def _boxed(program: StageProgram) -> StageProgram:
    graphs = {moment: _box(graph) for moment, graph in program.backwards.items()}
    return replace(program, forward=_box(program.forward), backwards=graphs)


def _box(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.set_codegen(BoxedCode())
    module.recompile()
    return module
