"""Run the passes once for identical layers and equal stages, and copy the results.

Three things are done here around the list of passes, none of them by a pass:
- the graph of one rank is built from few layers and repeated, where the step was captured so;
- where a stage holds many layers that the plan treats identically, all passes run on few of them,
  and the programs are repeated;
- of equal stages one is rewritten, and the others are copies with other names.

Each of them is proved correct or abandoned (NotRepeated): then the passes run on all layers, with
the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from graphaccel.capture.stepgraph import Repeats, StepGraph, of_layers
from graphaccel.errors import GraphAccelError
from graphaccel.ir.replication.layers import KEPT, NotRepeated, Run, copies
from graphaccel.ir.text import graph_text
from graphaccel.passes.adapters import of_rank
from graphaccel.passes.context import Context, Fixed
from graphaccel.passes.microbatch.exact_microbatch import LocalStep
from graphaccel.passes.replication.equal_stages import EqualStage, equal_stages
from graphaccel.passes.replication.few_layers import cut_layers, ends_among, stage_ends
from graphaccel.passes.replication.repeat_layers import repeat_layers
from graphaccel.passes.replication.repeat_programs import (
    LAYERS,
    check_messages,
    repeat_programs,
    rows_of,
)
from graphaccel.passes.replication.repeat_stages import repeat_stages
from graphaccel.passes.runner import Runner
from graphaccel.planner.plan.axis_placements import few_layers
from graphaccel.planner.plan.zero import owned_shards
from graphaccel.sharding.apply.local_graph import LocalGraph

log = logging.getLogger("graphaccel.passes")
T = TypeVar("T")


def run_replicated(run: Runner, context: Context) -> Context:
    """Run all passes of the runner's list. Raises what they raise."""
    context = run.run(context, "step")
    free = context.fixed == Fixed() and context.ort is None
    equal_nodes = context.step.repeats is not None and not context.plan.placements
    if free and equal_nodes and context.step.has_loss:
        try:
            return _programs_of_few(run, context)
        except (NotRepeated, GraphAccelError) as reason:  # then all layers are rewritten
            log.info("programs of all layers are rewritten: %s", reason)
    context = run.run(_one_rank(run, context), "joint")
    equal: Mapping[int, EqualStage] = {}
    if free and context.stages.stages > 2:
        context, equal = _without_equal(run, context)
    context = run.run(context, "program", "sums")
    programs = run.timed("repeat_stages", lambda: repeat_stages(context.programs, equal))
    return replace(context, programs=programs)


# ---- equal stages


def _without_equal(run: Runner, context: Context) -> tuple[Context, Mapping[int, EqualStage]]:
    """The context without stages that equal another one up to names, and those stages."""
    outlines, values = context.outlined, context.values
    known = context.owned, context.rank.partial, context.rank.parameter_shards

    def described(name: str) -> object:
        value = values.get(name)
        kind = value is not None and (value.shape, value.dtype)
        return (*(each.get(name) for each in known), name in context.shared, kind)

    equal = run.timed("equal_stages", lambda: equal_stages(outlines, described))
    kept = tuple(outline for outline in outlines if outline.stage not in equal)
    return replace(context, outlines=kept), equal


# ---- the graph of one rank


def _one_rank(run: Runner, context: Context) -> Context:
    """The graph of one rank: from few layers, repeated, where the step was captured so and the plan
    pins nothing for single layers."""
    step = context.step
    even = step.even(dict(context.plan.placements))
    if step.repeats is not None and context.fixed.parameter_shards is None and even:
        try:
            return _repeated(run, context, _few_sharded(run, context))
        except (NotRepeated, GraphAccelError) as reason:  # then all layers are sharded
            log.info("all layers are sharded: %s", reason)
    return run.run(context, "rank")


def _few_sharded(run: Runner, context: Context) -> Sequence[tuple[LocalStep, LocalGraph]]:
    """The captures of few layers, on one rank: once for all plans that split the step in the same
    way. Raises NotRepeated."""
    step, plan = context.step, context.plan
    split = (plan.data, plan.microbatches, plan.batch, plan.tensor, plan.context, plan.expert)
    described = (plan.placements, plan.axis_placements, plan.outputs)
    request = split, described, frozenset((context.sizes or {}).items())
    assert step.repeats is not None
    return step.analyses.cached(request, _shard_few, run, context, step.repeats)


def _shard_few(
    run: Runner, context: Context, few: Repeats
) -> Sequence[tuple[LocalStep, LocalGraph]]:
    """The steps of few layers, each on one rank, with the placements of the layers that it stands
    for. Raises NotRepeated."""
    least = [KEPT] * len(few.runs)
    longer = [[n + (i == more) for i, n in enumerate(least)] for more in range(len(least))]
    built = []
    for step, counts in zip((few.short, *few.longer), (least, *longer), strict=True):
        stated = context.plan.axis_placements
        own = tuple((axis, few_layers(places, few.runs, counts)) for axis, places in stated)
        plan = replace(context.plan, axis_placements=own)
        each = run.run(replace(context, step=step, plan=plan), "rank")
        built.append((each.part, each.rank))
    before = {"" if p.prologue is None else graph_text(p.prologue.graph.graph) for p, _ in built}
    if len(before) > 1:
        raise NotRepeated("what is computed once a step depends on the number of layers")
    return built


def _repeated(
    run: Runner, context: Context, few: Sequence[tuple[LocalStep, LocalGraph]]
) -> Context:
    """The graph of one rank with all layers of the step, from the graphs of few."""
    graphs = [axes.graph for _, axes in few]
    whole = run.timed("repeat_layers", lambda: repeat_layers(context.step, graphs))
    run.dump("repeat_layers", whole.graph)
    local, axes = few[0]
    places = tuple(local.output_places[i] for i in whole.outputs)
    parameter_shards, partial = whole.spread(axes.parameter_shards), whole.spread(axes.partial)
    local_graph = LocalGraph(whole.graph, parameter_shards, partial)
    return of_rank(context, replace(local, output_places=places), local_graph)


# ---- the programs of stages with many layers


def _programs_of_few(run: Runner, context: Context) -> Context:
    """The programs of all layers, from those of few. Raises NotRepeated."""
    step, plan = context.step, context.plan
    assert step.repeats is not None
    rows = rows_of(step.repeats.runs, plan.recomputed, cut_layers(stage_ends(step, plan.cuts)))
    if not rows or not is_less_work(rows, step):
        raise NotRepeated("the plan treats too few layers in a row alike")
    few = [LAYERS] * len(rows)
    counts = [few, *([n + (r == more) for r, n in enumerate(few)] for more in range(len(rows)))]
    built = [_of_count(run, context, rows, count) for count in counts]
    if any(each.weights for each in built):
        raise NotRepeated("gradients of weights are apart")
    summed = [run.run(each, "sums") for each in built]
    alone = all(map(_layer_by_layer, summed))
    built_of = zip(*(each.programs for each in (summed if alone else built)), strict=True)
    programs = run.timed(
        "repeat_programs", lambda: tuple(repeat_programs(step, rows, own) for own in built_of)
    )
    check_messages(programs)
    whole = replace(_spread_known(context, rows, built[0]), programs=programs)
    return whole if alone else run.run(whole, "sums")


def _of_count(run: Runner, context: Context, rows: Sequence[Run], count: Sequence[int]) -> Context:
    """The context after all passes except the "sums", with `count` layers in each row."""
    step, plan = _with_rows(context.step, rows, count), context.plan
    ends = stage_ends(context.step, plan.cuts)
    own = plan.with_recomputed({
        block.name: plan.recomputed[full]
        for block in step.blocks
        if (full := copies(rows, block.name, count)[0]) in plan.recomputed
    })  # fmt: skip
    own = replace(own, cuts=ends_among(ends, rows, count, step))
    few = _repeated(run, replace(context, step=step, plan=own), _few_sharded(run, context))
    return run.run(few, "joint", "program")


def _spread_known(context: Context, rows: Sequence[Run], few: Context) -> Context:
    """Facts about the parameters and outputs of few layers, extended to all of them."""
    parameter_shards, partial = (
        _spread(rows, few.rank.parameter_shards),
        _spread(rows, few.rank.partial),
    )
    owned, unsharded = owned_shards(context.step, context.plan, parameter_shards)
    places = _places(context.step, few.step, rows, few.part)
    return replace(
        few,
        step=context.step,
        plan=context.plan,
        local=replace(few.part, output_places=places),
        axes=replace(few.rank, parameter_shards=parameter_shards, partial=partial),
        shared=_spread(rows, few.shared),
        owned=owned,
        unsharded=unsharded,
    )


def _layer_by_layer(summed: Context) -> bool:
    """Whether no two layers have gradients in one buffer: gradients of sharded parameters (ZeRO 3)
    do not. The size of other buckets depends on all layers."""
    reduced = (name for program in summed.programs for group in program.reduced for name in group)
    sharded = all(summed.owned[name].level == 3 for name in reduced)
    return sharded and not any(program.buckets for program in summed.programs)


def is_less_work(rows: Sequence[Run], step: StepGraph) -> bool:
    """Whether rewriting few layers of the rows, once and with one more layer of each row, is less
    work than rewriting all; of one row it is always done so."""
    short = len(step.blocks) - sum(row.count - LAYERS for row in rows)
    return len(rows) == 1 or len(rows) + (len(rows) + 1) * short < len(step.blocks)


def _with_rows(step: StepGraph, rows: Sequence[Run], counts: Sequence[int]) -> StepGraph:
    """The step with `counts` layers in each of the rows. Raises NotRepeated."""
    assert step.repeats is not None
    fewer = dict.fromkeys(step.repeats.runs, 0)
    for row, count in zip(rows, counts, strict=True):
        (run,) = (r for r in fewer if r.path == row.path and 0 <= row.first - r.first < r.count)
        fewer[run] += row.count - count
    return of_layers(step, [run.count - less for run, less in fewer.items()])


def _spread(rows: Sequence[Run], known: Mapping[str, T]) -> dict[str, T]:
    """Facts about the parameters of few layers, extended to all of them."""
    return {full: value for name, value in known.items() for full in copies(rows, name, LAYERS)}


def _places(
    step: StepGraph, few: StepGraph, rows: Sequence[Run], local: LocalStep
) -> tuple[str | int, ...]:
    """The batch placement of each output of all layers. local: of few."""
    known = {
        (spec.kind, spec.leaf, name): place
        for spec, place in zip(few.outputs, local.output_places, strict=True)
        for name in copies(rows, spec.name, LAYERS)
    }
    return tuple(known[spec.kind, spec.leaf, spec.name] for spec in step.outputs)
