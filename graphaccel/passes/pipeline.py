"""The passes in order, each with why it stands where it does.

lower_precision        on the forward graph: autograd then derives the casts of the backward
fuse                   after it, so that patterns see the casts that will run; before
                       differentiation, so that one pattern a kernel is enough
synchronise_batch_norm on the forward graph, before differentiation, for the same reason
drop_backward          evaluation: nothing to differentiate
(differentiate)        capture's, again, where one of these changed the forward graph
exact_microbatch       sizes shrink here: everything later sees one microbatch of one data rank
shard_axes             local shapes and collectives of the tensor, context and expert axes: on one
                       microbatch of one data rank, and while the graph is still one
repeat_layers          what the two before it made of few layers becomes all of them; what follows
                       decides for single layers
recompute              before the cut, so that a stage owns its clones
release_parameters     as recompute, for what is made of sharded parameters alone
cut_stages             needs the final joint graph
split_phases           needs stages: what is saved is decided a stage at a time
split_weights          where the schedule has weights apart: what follows sees two backwards
place_ort              after the split, so that no region spans two stages or the two phases;
                       before the sums, which are in place
choose_products        sizes and dtypes are final; before accumulation, which lets other products
                       write into buckets
overlap_collectives    moves calls, so before what writes in place; after the split, or work would
                       move from one phase into the other
gather_parameters      a phase at a time: it needs to know the first and the last use
drop_tangents          where the loss is outside, and while training: for a loss that reads some of
                       the outputs only, the stage with a backward of its own
accumulate_gradients   late: it brings in-place ops, after which nothing may be moved
reduce_shards          last, for the same reason: it makes the same moments of the step
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import sympy
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import BoxedCode
from graphaccel.errors import GraphAccelError
from graphaccel.ir.program import Owned, Prologue, Sharded, StageProgram, StepProgram
from graphaccel.ir.repeat import NotRepeated
from graphaccel.ir.text import graph_text
from graphaccel.passes.accumulate_gradients import accumulate_gradients
from graphaccel.passes.choose_products import choose_products
from graphaccel.passes.cut_stages import StagedGraph, cut_stages
from graphaccel.passes.drop_backward import drop_backward
from graphaccel.passes.drop_tangents import drop_tangents
from graphaccel.passes.exact_microbatch import LocalStep, exact_microbatch
from graphaccel.passes.fuse import fuse
from graphaccel.passes.gather_parameters import gather_parameters
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.overlap_collectives import overlap_collectives
from graphaccel.passes.place_ort import Tools, place_ort, region_models
from graphaccel.passes.recompute import recompute
from graphaccel.passes.reduce_shards import reduce_shards
from graphaccel.passes.release_parameters import release_parameters
from graphaccel.passes.repeat_layers import repeat_layers
from graphaccel.passes.runner import Runner
from graphaccel.passes.shard_axes import LocalGraph, shard_axes
from graphaccel.passes.split_phases import split_phases
from graphaccel.passes.split_weights import split_weights, with_weights
from graphaccel.passes.synchronise_batch_norm import synchronise_batch_norm
from graphaccel.planner.plan import Plan
from graphaccel.planner.zero import owned_shards
from graphaccel.rules.propagate import PARTIAL, is_random

log = logging.getLogger("graphaccel.passes")


def build(
    step: StepGraph,
    plan: Plan,
    *,
    sizes: Mapping[sympy.Symbol, int] | None = None,
    homes: Mapping[str, tuple[int, ...]] | None = None,
    gradients: bool = True,
    resting: Mapping[str, tuple[Sharded, ...]] | None = None,
    groups: tuple[tuple[str, ...], ...] | None = None,
    ranks: int | None = None,
    ort: Tools | None = None,
) -> StepProgram:
    """Rewrite a captured step as the plan says: one program a stage.

    sizes: symbol sizes of the batch that will be passed, where they differ from the capture's.
    homes: stages of parameters that already lie somewhere. gradients: False for a forward alone.
    resting: how parameters rest already, where another program of theirs runs. groups: as those
    that rest sharded over data lie. ranks: on the data axis, for an evaluation, whose plan has
    none. ort: what placing ONNX Runtime regions needs, where the plan
    has some.

    Raises: BadPin (GA202), SplitRefused (GA207), TooManyStages (GA203).
    """
    run = Runner(plan)
    step = run.step(
        "lower_precision", functools.partial(_once, lower_precision, plan.precision), step
    )
    step = run.step("fuse", functools.partial(_once, fuse, (plan.fusions, plan.outputs)), step)
    step = run.step("synchronise_batch_norm", synchronise_batch_norm, step)
    if not gradients:
        step = run.step("drop_backward", drop_backward, step)
    local, axes = _sharded(run, step, plan, sizes, resting)
    graph = run.graph("recompute", lambda g: recompute(g, plan, step.positions), axes.graph)
    owned, unsharded = owned_shards(step, plan, axes.resting, ranks)
    inputs = zip(graph.graph.find_nodes(op="placeholder"), step.inputs, strict=False)
    values = {s.name: n for n, s in inputs if s.kind == "parameter"}
    whole = {n.name for s, n in values.items() if s in owned and owned[s].level == 3}
    graph = run.graph("release_parameters", lambda g: release_parameters(g, whole), graph)
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
    programs, weights = run.call("split_weights", lambda: split_weights(programs, plan))
    programs, report = run.call("place_ort", lambda: place_ort(programs, plan, ort))
    programs = run.call("choose_products", lambda: tuple(choose_products(p) for p in programs))
    weights = tuple(choose_products(p) for p in weights)
    programs = run.call(
        "overlap_collectives", lambda: tuple(overlap_collectives(p) for p in programs)
    )
    bare = run.call(
        "gather_parameters",
        lambda: tuple(
            gather_parameters(
                _apart(p, owned),
                plan,
                owned,
                ranks or plan.data,
                {name: node.meta["val"] for name, node in values.items()},
                shared=[n for n, at in staged.homes.items() if len(at) > 1],
                groups=groups,
                last=p.stage == staged.stages - 1,
            )
            for p in programs
        ),
    )
    programs = run.call(
        "accumulate_gradients",
        lambda: tuple(accumulate_gradients(p, plan, axes.partial) for p in bare),
    )
    weights = tuple(accumulate_gradients(p, plan, axes.partial) for p in weights)
    programs = run.call(
        "reduce_shards",
        lambda: tuple(reduce_shards(p, plan, owned, axes.partial) for p in programs),
    )
    if weights:
        programs = tuple(with_weights(p, w) for p, w in zip(programs, weights, strict=True))
    for name, content in region_models(programs).items():
        run.write(f"{name}.onnx", content)
    for program in programs:
        run.dump(f"stage_{program.stage}_forward", program.forward)
        for phase, graphs in (("backward", program.backwards), ("weight", program.weights)):
            for (first, last), graph in graphs.items():
                moment = "_first" * first + "_last" * last
                run.dump(f"stage_{program.stage}_{phase}{moment}", graph)
    apart = gradients and not step.has_loss
    program = _assembled(step, staged, programs, local.prologue, local.output_places)
    rests = dict(axes.resting)
    for name, own in owned.items():
        if own.level == 3:
            rests[name] = (*rests.get(name, ()), own.split)
    return replace(
        program,
        resting=rests,
        partial=axes.partial,
        owned=owned,
        unsharded=unsharded,
        data=plan.data,
        bare=bare[0] if apart else None,
        ort=report,
    )


def _sharded(
    run: Runner,
    step: StepGraph,
    plan: Plan,
    sizes: Mapping[sympy.Symbol, int] | None,
    resting: Mapping[str, tuple[Sharded, ...]] | None,
) -> tuple[LocalStep, LocalGraph]:
    """The step of one microbatch on one rank: of few layers, repeated, where it is made of such and
    nothing is said of single layers."""
    few = step.repeats
    if few is not None and resting is None and not plan.placements:
        try:
            return _repeated(run, step, plan, sizes)
        except (NotRepeated, GraphAccelError) as reason:  # errors are then those of the model
            log.info("all layers are sharded: %s", reason)
    local = run.call("exact_microbatch", lambda: exact_microbatch(step, plan, sizes))
    run.dump("exact_microbatch", local.graph)
    axes = run.call("shard_axes", lambda: shard_axes(local.graph, step, plan, resting))
    run.dump("shard_axes", axes.graph)
    return local, axes


def _repeated(
    run: Runner, step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None
) -> tuple[LocalStep, LocalGraph]:
    few = step.repeats
    assert few is not None
    steps = (few.short, *few.longer)
    parts = run.call(
        "exact_microbatch", lambda: [exact_microbatch(each, plan, sizes) for each in steps]
    )
    prologues = {"" if p.prologue is None else graph_text(p.prologue.graph.graph) for p in parts}
    if len(prologues) > 1:
        raise NotRepeated("what is computed once a step depends on the number of layers")
    made = run.call(
        "shard_axes",
        lambda: [shard_axes(p.graph, each, plan) for p, each in zip(parts, steps, strict=True)],
    )
    if any(each.guessed for each in made):
        raise NotRepeated("some calls are not placed exactly")
    whole = run.call("repeat_layers", lambda: repeat_layers(step, [each.graph for each in made]))
    run.dump("repeat_layers", whole.graph)
    local, axes = parts[0], made[0]
    return (
        replace(local, output_places=tuple(local.output_places[i] for i in whole.outputs)),
        LocalGraph(whole.graph, whole.spread(axes.resting), whole.spread(axes.partial), {}),
    )


def _apart(program: StageProgram, owned: Mapping[str, Owned]) -> StageProgram:
    """Gradients that are kept in shards are outputs of a kind of their own."""
    outputs = tuple(
        replace(v, kind="shard")
        if v.kind == "gradient" and v.name in owned and owned[v.name].level > 1
        else v
        for v in program.backward_outputs
    )
    return replace(program, backward_outputs=outputs)


def fused(step: StepGraph, plan: Plan) -> StepGraph:
    """The step with the plan's fusions, in the precision it was captured in: what is planned on."""
    return _once(fuse, (plan.fusions, plan.outputs), step, plan)


def _once(
    run: Callable[[StepGraph, Plan], StepGraph], asked: Hashable, step: StepGraph, plan: Plan
) -> StepGraph:
    """A pass that depends on the step and `asked` alone: its result is kept for other plans."""
    key = (run.__name__, asked)
    if key not in step.derived:
        step.derived[key] = run(step, plan)
    return step.derived[key]


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
        input_places={
            o.leaf: p
            for o, p in zip(step.outputs, places, strict=True)
            if o.kind == "input_gradient"
        },
    )


def backward_of(program: StepProgram, plan: Plan, used: frozenset[int]) -> StageProgram:
    """The stage with the backward of a loss that reads the output leaves `used` alone.

    Of a program whose loss is outside of the graph. Parameters and batch leaves that such a loss
    does not reach have no gradient in it.
    """
    assert program.bare is not None
    if used == frozenset(program.tangents):
        return program.stages[0]
    return _boxed(accumulate_gradients(drop_tangents(program.bare, used), plan, program.partial))


def _boxed(program: StageProgram) -> StageProgram:
    backwards = {moment: _box(graph) for moment, graph in program.backwards.items()}
    weights = {moment: _box(graph) for moment, graph in program.weights.items()}
    return replace(program, forward=_box(program.forward), backwards=backwards, weights=weights)


def _box(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.set_codegen(BoxedCode())
    module.recompile()
    return module
