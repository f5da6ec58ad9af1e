"""The middle of the pipeline: from a captured step to the programs of its stages.

What is rewritten of few layers is repeated as late as it can be: programs where stages hold many
layers, row by row of those that are treated alike, otherwise the joint graph of one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import sympy
import torch

from graphaccel.capture.stepgraph import Repeats, StepGraph, of_layers
from graphaccel.errors import GraphAccelError
from graphaccel.ir.calls import is_random
from graphaccel.ir.layers import NotRepeated, Run, copies
from graphaccel.ir.program import OrtReport, Owned, Sharded, StageProgram
from graphaccel.ir.text import graph_text
from graphaccel.passes.accumulate_gradients import accumulate_gradients
from graphaccel.passes.choose_products import choose_products
from graphaccel.passes.chunk_loss import chunk_loss
from graphaccel.passes.cut_stages import cut_stages
from graphaccel.passes.equal_stages import Twin, equal_stages
from graphaccel.passes.exact_microbatch import LocalStep, exact_microbatch
from graphaccel.passes.few_layers import cut_layers, ends_among, stage_ends
from graphaccel.passes.gather_parameters import gather_parameters
from graphaccel.passes.hold_casts import hold_casts
from graphaccel.passes.hold_parameters import hold_parameters
from graphaccel.passes.offload_activations import offload_activations
from graphaccel.passes.outline_stages import outline_stages
from graphaccel.passes.overlap_collectives import overlap_collectives
from graphaccel.passes.place_ort import Tools, place_ort
from graphaccel.passes.recompute import recompute
from graphaccel.passes.reduce_shards import reduce_shards
from graphaccel.passes.release_parameters import release_parameters
from graphaccel.passes.repeat_layers import repeat_layers
from graphaccel.passes.repeat_programs import LAYERS, check_messages, repeat_programs, rows_of
from graphaccel.passes.repeat_stages import repeat_stages
from graphaccel.passes.runner import Runner
from graphaccel.passes.scatter_sends import scatter_sends
from graphaccel.passes.shard_axes import Alike, LocalGraph, over_few, shard_axes
from graphaccel.passes.split_phases import split_phases
from graphaccel.passes.split_weights import split_weights, with_weights
from graphaccel.passes.two_pass_head import two_pass_head
from graphaccel.passes.upload_parameters import upload_parameters
from graphaccel.planner.plan import Plan
from graphaccel.planner.zero import owned_shards

log = logging.getLogger("graphaccel.passes")
_CAST = torch.ops.aten._to_copy.default
T = TypeVar("T")
Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Lying:
    """Where parameters lie already (`pipeline.build`); None where the plan decides."""

    homes: Mapping[str, tuple[int, ...]] | None = None
    resting: Mapping[str, tuple[Sharded, ...]] | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    ranks: int | None = None

    @property
    def free(self) -> bool:
        """Whether nothing lies anywhere yet."""
        return self == Lying()


@dataclass(frozen=True)
class Rewritten:
    """Programs of stages, with what else `ir.program.StepProgram` says. bare: without accumulators.
    weights: gradients of weights, where they are apart. local: the step of one microbatch.
    twins: the stages that are not among them, because they are one of them with other names."""

    programs: tuple[StageProgram, ...]
    bare: tuple[StageProgram, ...]
    weights: tuple[StageProgram, ...]
    local: LocalStep
    axes: LocalGraph
    shared: Mapping[str, tuple[int, ...]]
    random: bool
    owned: Mapping[str, Owned]
    unsharded: Mapping[str, str]
    ort: OrtReport | None
    twins: Mapping[int, Twin] = field(default_factory=dict)


def rewritten(
    run: Runner,
    step: StepGraph,
    plan: Plan,
    sizes: Sizes | None,
    lying: Lying,
    ort: Tools | None,
) -> Rewritten:
    """Everything from `exact_microbatch` on."""
    alike = step.repeats is not None and step.has_loss and not plan.placements
    if alike and lying.free and ort is None:
        try:
            return _of_few(run, step, plan, sizes)
        except (NotRepeated, GraphAccelError) as reason:  # errors are then those of the model
            log.info("programs of all layers are rewritten: %s", reason)
    local, axes = _sharded(run, step, plan, sizes, lying.resting)
    made = _summed(run, plan, _bare(run, step, plan, local, axes, lying, ort))
    programs = run.call("repeat_stages", lambda: repeat_stages(made.programs, made.twins))
    return replace(made, programs=programs)


def _bare(
    run: Runner,
    step: StepGraph,
    plan: Plan,
    local: LocalStep,
    axes: LocalGraph,
    lying: Lying,
    ort: Tools | None,
    *,
    twins: bool = True,
) -> Rewritten:
    """The programs before gradients are summed. twins: of equal stages, one."""
    graph = run.graph("recompute", lambda g: recompute(g, plan, step.positions), axes.graph)
    owned, unsharded = owned_shards(step, plan, axes.resting, lying.ranks)
    inputs = zip(graph.graph.find_nodes(op="placeholder"), step.inputs, strict=False)
    values = {s.name: n for n, s in inputs if s.kind == "parameter"}
    whole = {n.name for s, n in values.items() if s in owned and owned[s].level == 3}
    whole |= {n.name for n in values.values() if any(u.target is _CAST for u in n.users)}
    if "parameters" in plan.offload:  # the backward reads what is copied up for it
        whole |= {n.name for n in values.values()}
    graph = run.graph("release_parameters", lambda g: release_parameters(g, whole), graph)
    staged = run.call(
        "cut_stages",
        lambda: cut_stages(
            graph,
            step.inputs,
            step.outputs,
            step.positions,
            plan.cuts,
            lying.homes,
            () if local.prologue is None else local.prologue.buffers,
        ),
    )
    staged = run.call("scatter_sends", lambda: scatter_sends(staged, plan))
    shared = {name: at for name, at in staged.homes.items() if len(at) > 1}
    outlines = outline_stages(staged, step, keep_outputs=plan.outputs == "all")
    equal: Mapping[int, Twin] = {}
    if twins and lying.free and ort is None and staged.stages > 2:

        def told(name: str) -> object:
            known = [each.get(name) for each in (owned, axes.partial, axes.resting)]
            value = values[name].meta["val"] if name in values else None
            return (*known, name in shared, value is not None and (value.shape, value.dtype))

        equal = run.call("equal_stages", lambda: equal_stages(outlines, told))
    outlines = tuple(each for each in outlines if each.stage not in equal)
    programs = run.call("split_phases", lambda: split_phases(staged, outlines))
    if local.headed:
        programs = run.call("two_pass_head", lambda: two_pass_head(programs))
    programs, weights = run.call("split_weights", lambda: split_weights(programs, plan))
    programs, report = run.call("place_ort", lambda: place_ort(programs, plan, ort))
    programs = run.call("chunk_loss", lambda: tuple(chunk_loss(p, plan) for p in programs))
    programs = run.call("choose_products", lambda: tuple(choose_products(p) for p in programs))
    weights = tuple(choose_products(p) for p in weights)
    programs = run.call(
        "overlap_collectives", lambda: tuple(overlap_collectives(p) for p in programs)
    )
    programs = run.call(
        "offload_activations", lambda: tuple(offload_activations(p, plan) for p in programs)
    )
    programs = tuple(_apart(p, owned) for p in programs)
    known = owned, lying.ranks or plan.shards, {name: n.meta["val"] for name, n in values.items()}
    lies: Any = {"shared": shared, "groups": lying.groups}
    if plan.reshard_after_forward == "once_per_step":
        programs = run.call(
            "hold_parameters",
            lambda: tuple(hold_parameters(p, plan, *known, **lies) for p in programs),
        )
    final = staged.stages - 1
    programs = run.call(
        "gather_parameters",
        lambda: tuple(
            p
            if p.prepare is not None
            else gather_parameters(p, plan, *known, **lies, last=p.stage == final)
            for p in programs
        ),
    )
    programs = run.call("hold_casts", lambda: tuple(hold_casts(p, plan) for p in programs))
    programs = run.call(
        "upload_parameters", lambda: tuple(upload_parameters(p, plan) for p in programs)
    )
    return Rewritten(
        programs,
        programs,
        weights,
        local,
        axes,
        shared,
        any(is_random(n) for n in staged.graph.graph.nodes if n.op == "call_function"),
        owned,
        unsharded,
        report,
        equal,
    )


def _summed(run: Runner, plan: Plan, made: Rewritten) -> Rewritten:
    """The programs that add gradients up, and sum them over ranks."""
    partial = made.axes.partial
    programs = run.call(
        "accumulate_gradients",
        lambda: tuple(accumulate_gradients(p, plan, partial) for p in made.bare),
    )
    programs = run.call(
        "reduce_shards",
        lambda: tuple(reduce_shards(p, plan, made.owned, partial) for p in programs),
    )
    if made.weights:
        weights = (accumulate_gradients(p, plan, partial) for p in made.weights)
        programs = tuple(with_weights(p, w) for p, w in zip(programs, weights, strict=True))
    return replace(made, programs=programs)


def _apart(program: StageProgram, owned: Mapping[str, Owned]) -> StageProgram:
    """Gradients that are kept in shards are outputs of a kind of their own."""
    outputs = tuple(
        replace(v, kind="shard")
        if v.kind == "gradient" and v.name in owned and owned[v.name].level > 1
        else v
        for v in program.backward_outputs
    )
    return replace(program, backward_outputs=outputs)


def _of_few(run: Runner, step: StepGraph, plan: Plan, sizes: Sizes | None) -> Rewritten:
    """The programs of all layers, made of those of few. Raises NotRepeated."""
    assert step.repeats is not None
    cuts = stage_ends(step, plan.cuts)
    rows = rows_of(step.repeats.runs, plan.again, cut_layers(cuts))
    if not rows or not _fewer(rows, step):
        raise NotRepeated("the plan treats too few layers in a row alike")
    few = [LAYERS] * len(rows)
    counts = [few, *([n + (r == more) for r, n in enumerate(few)] for more in range(len(rows)))]
    steps = [_with_rows(step, rows, each) for each in counts]
    sharded = _few_sharded(run, step, plan, sizes)
    made = []
    for each, count in zip(steps, counts, strict=True):
        local, axes = _repeated(run, each, *sharded)
        own = plan.doing_again({
            b.name: plan.again[full]
            for b in each.blocks
            if (full := copies(rows, b.name, count)[0]) in plan.again
        })  # fmt: skip
        own = replace(own, cuts=ends_among(cuts, rows, count, each))
        made.append(_bare(run, each, own, local, axes, Lying(), None, twins=False))
    if any(each.weights for each in made):
        raise NotRepeated("gradients of weights are apart")
    short = made[0]
    resting, partial = (_spread(rows, k) for k in (short.axes.resting, short.axes.partial))
    owned, unsharded = owned_shards(step, plan, resting)
    found = replace(
        short,
        local=replace(short.local, output_places=_places(step, steps[0], rows, short.local)),
        axes=replace(short.axes, resting=resting, partial=partial),
        shared=_spread(rows, short.shared),
        owned=owned,
        unsharded=unsharded,
    )
    summed = [_summed(run, plan, each) for each in made]
    alone = all(_layer_by_layer(each) for each in summed)
    made_of = zip(*(each.programs for each in (summed if alone else made)), strict=True)
    whole = run.call(
        "repeat_programs", lambda: tuple(repeat_programs(step, rows, own) for own in made_of)
    )
    check_messages(whole)
    found = replace(found, programs=whole, bare=whole)
    return found if alone else _summed(run, plan, found)


def _layer_by_layer(made: Rewritten) -> bool:
    """Whether no layer's gradients share a buffer with another's: those of parameters that rest in
    shards lie as they do. The size of other buckets depends on all layers."""
    reduced = (name for each in made.programs for group in each.reduced for name in group)
    sharded = all(made.owned[name].level == 3 for name in reduced)
    return sharded and not any(each.buckets for each in made.programs)


def _fewer(rows: Sequence[Run], step: StepGraph) -> bool:
    """Whether rewriting few layers of the rows, once and with one more of each row, is less to do
    than rewriting all; of one row it is always done so."""
    short = len(step.blocks) - sum(row.count - LAYERS for row in rows)
    return len(rows) == 1 or len(rows) + (len(rows) + 1) * short < len(step.blocks)


def _with_rows(step: StepGraph, rows: Sequence[Run], counts: Sequence[int]) -> StepGraph:
    """The step with `counts` layers in each of the rows. Raises NotRepeated."""
    assert step.repeats is not None
    gone = dict.fromkeys(step.repeats.runs, 0)
    for row, count in zip(rows, counts, strict=True):
        (run,) = (r for r in gone if r.path == row.path and 0 <= row.first - r.first < r.count)
        gone[run] += row.count - count
    return of_layers(step, [run.count - less for run, less in gone.items()])


def _spread(rows: Sequence[Run], known: Mapping[str, T]) -> dict[str, T]:
    """What is known of the parameters of few layers, of all of them."""
    return {full: value for name, value in known.items() for full in copies(rows, name, LAYERS)}


def _places(step: StepGraph, few: StepGraph, rows: Sequence[Run], local: LocalStep) -> tuple:
    """Where the batch lies in each output of all layers. local: of few."""
    known = {
        (spec.kind, spec.leaf, name): place
        for spec, place in zip(few.outputs, local.output_places, strict=True)
        for name in copies(rows, spec.name, LAYERS)
    }
    return tuple(known[spec.kind, spec.leaf, spec.name] for spec in step.outputs)


def _sharded(
    run: Runner,
    step: StepGraph,
    plan: Plan,
    sizes: Sizes | None,
    resting: Mapping[str, tuple[Sharded, ...]] | None,
) -> tuple[LocalStep, LocalGraph]:
    """The step of one microbatch on one rank: of few layers, repeated, where it is made of such and
    nothing is said of single layers."""
    few = step.repeats
    if few is not None and resting is None and step.even(dict(plan.placements)):
        try:
            return _repeated(run, step, *_few_sharded(run, step, plan, sizes))
        except (NotRepeated, GraphAccelError) as reason:  # errors are then those of the model
            log.info("all layers are sharded: %s", reason)
    local = run.call("exact_microbatch", lambda: exact_microbatch(step, plan, sizes))
    run.dump("exact_microbatch", local.graph)
    axes = run.call("shard_axes", lambda: shard_axes(local.graph, step, plan, resting))
    run.dump("shard_axes", axes.graph)
    return local, axes


def _few_sharded(
    run: Runner, step: StepGraph, plan: Plan, sizes: Sizes | None
) -> tuple[list[LocalStep], list[LocalGraph]]:
    """The captures of few layers, of one microbatch and sharded: once for all plans that split the
    step in the same way. Raises NotRepeated."""
    split = (plan.data, plan.microbatches, plan.batch, plan.tensor, plan.context, plan.expert)
    told = (plan.placements, plan.rates, plan.sequence, plan.context_by, plan.outputs)
    key = ("sharded", split, told, frozenset((sizes or {}).items()))
    if key not in step.derived:
        step.derived[key] = _shard_few(run, step, plan, sizes)
    return step.derived[key]


def _shard_few(
    run: Runner, step: StepGraph, plan: Plan, sizes: Sizes | None
) -> tuple[list[LocalStep], list[LocalGraph]]:
    few = step.repeats
    assert few is not None
    steps = (few.short, *few.longer)
    parts = run.call(
        "exact_microbatch", lambda: [exact_microbatch(each, plan, sizes) for each in steps]
    )
    prologues = {"" if p.prologue is None else graph_text(p.prologue.graph.graph) for p in parts}
    if len(prologues) > 1:
        raise NotRepeated("what is computed once a step depends on the number of layers")
    made = run.call("shard_axes", lambda: _few_over_axes(plan, few, parts))
    if any(each.guessed for each in made):
        raise NotRepeated("some calls are not placed exactly")
    return parts, made


def _few_over_axes(plan: Plan, few: Repeats, parts: Sequence[LocalStep]) -> list[LocalGraph]:
    graphs = {
        id(step): part.graph for step, part in zip((few.short, *few.longer), parts, strict=True)
    }

    def made(step: StepGraph, twin: Alike | None) -> tuple[LocalGraph, LocalGraph]:
        found = shard_axes(graphs[id(step)], step, plan, twin=twin)
        return found, found

    return over_few(few, made)


def _repeated(
    run: Runner, step: StepGraph, parts: Sequence[LocalStep], made: Sequence[LocalGraph]
) -> tuple[LocalStep, LocalGraph]:
    """All layers of the step, made of its sharded captures of few."""
    whole = run.call("repeat_layers", lambda: repeat_layers(step, [each.graph for each in made]))
    run.dump("repeat_layers", whole.graph)
    local, axes = parts[0], made[0]
    return (
        replace(local, output_places=tuple(local.output_places[i] for i in whole.outputs)),
        LocalGraph(whole.graph, whole.spread(axes.resting), whole.spread(axes.partial), {}),
    )
