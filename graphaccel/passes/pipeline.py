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
repeat_layers          what the two before it made of few layers becomes all of them, where what
                       follows tells layers apart: several stages, or some that are recomputed
recompute              before the cut, so that a stage owns its clones
release_parameters     as recompute, for what is made of sharded parameters alone
cut_stages             needs the final joint graph
scatter_sends          needs to know what crosses; before the phases, whose values are sent
split_phases           needs stages: what is saved is decided a stage at a time
two_pass_head          of the backward of the last stage, before it is divided further
split_weights          where the schedule has weights apart: what follows sees two backwards
place_ort              after the split, so that no region spans two stages or the two phases;
                       before the sums, which are in place
chunk_loss             one number of a call; a phase at a time, as what follows
choose_products        sizes and dtypes are final; before accumulation, which lets other products
                       write into buckets
overlap_collectives    moves calls, so before what writes in place; after the split, or work would
                       move from one phase into the other
offload_activations    what is saved is final, and calls stand where they will; before parameters
                       are gathered, which are no activations
gather_parameters      a phase at a time: it needs to know the first and the last use
hold_parameters        instead, where the plan gathers them once for all microbatches
hold_casts             after both: what they gather is no parameter of the graph any more
upload_parameters      after gather_parameters, whose shards it copies up; no call moves behind it
repeat_programs        instead of repeat_layers, where stages treat many layers alike; before
                       accumulate_gradients, whose buckets are as large as all layers tell
drop_tangents          where the loss is outside, and while training: for a loss that reads some of
                       the outputs only, the stage with a backward of its own
accumulate_gradients   late: it brings in-place ops, after which nothing may be moved
reduce_shards          last, for the same reason: it makes the same moments of the step
repeat_stages          of equal stages one went through all of these, and the others are made of it
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import sympy

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import boxed
from graphaccel.ir.program import Sharded, StageProgram, StepProgram
from graphaccel.ir.unfold import distinct_nodes
from graphaccel.passes.accumulate_gradients import accumulate_gradients
from graphaccel.passes.drop_backward import drop_backward
from graphaccel.passes.drop_tangents import drop_tangents
from graphaccel.passes.fuse import fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.place_ort import Tools, region_models
from graphaccel.passes.rewrite import Lying, Rewritten, rewritten
from graphaccel.passes.runner import Runner
from graphaccel.passes.synchronise_batch_norm import synchronise_batch_norm
from graphaccel.planner.plan import Plan
from graphaccel.rules.propagate import PARTIAL

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
    that rest sharded over data lie. ranks: over which ZeRO shards, for an evaluation, whose plan
    has no data axis. ort: what placing ONNX Runtime regions needs, where the plan has some.

    Raises: BadPin (GA202), SplitRefused (GA207), TooManyStages (GA203).
    """
    run = Runner(plan)
    lower = functools.partial(_once, lower_precision, plan.precision)
    step = run.step("lower_precision", lower, step)
    step = run.step("fuse", functools.partial(_once, fuse, (plan.fusions, plan.outputs)), step)
    step = run.step("synchronise_batch_norm", synchronise_batch_norm, step)
    if not gradients:
        step = run.step("drop_backward", drop_backward, step)
    made = rewritten(run, step, plan, sizes, Lying(homes, resting, groups, ranks), ort)
    programs = made.programs
    for name, content in region_models(programs).items():
        run.write(f"{name}.onnx", content)
    for program in programs:
        if program.prepare is not None:
            run.dump(f"stage_{program.stage}_prepare", program.prepare)
        if program.head is not None:
            run.dump(f"stage_{program.stage}_head", program.head)
        run.dump(f"stage_{program.stage}_forward", program.forward)
        for phase, graphs in (("backward", program.backwards), ("weight", program.weights)):
            for (first, last), graph in graphs.items():
                moment = "_first" * first + "_last" * last
                run.dump(f"stage_{program.stage}_{phase}{moment}", graph)
    apart = gradients and not step.has_loss
    rests = dict(made.axes.resting)
    for name, own in made.owned.items():
        if own.level == 3:
            rests[name] = (*rests.get(name, ()), own.split)
    return replace(
        _assembled(step, made),
        resting=rests,
        partial=made.axes.partial,
        owned=made.owned,
        unsharded=made.unsharded,
        data=plan.data,
        bare=made.bare[0] if apart else None,
        ort=made.ort,
    )


def prepared(step: StepGraph, plan: Plan) -> StepGraph:
    """The step in the plan's precision and with its fusions: what is planned on."""
    step = _once(lower_precision, plan.precision, step, plan)
    return _once(fuse, (plan.fusions, plan.outputs), step, plan)


def placed_fusions(step: StepGraph, plan: Plan) -> dict[str, int]:
    """How often `build` places each of the plan's fusions, by name."""
    low = _once(lower_precision, plan.precision, step, plan)
    forward = _once(fuse, (plan.fusions, plan.outputs), low, plan).forward.graph
    placed: Counter[str] = Counter()
    for node, count in distinct_nodes(forward):
        made_by = str(node.meta.get("made_by"))
        if node.meta.get("covers") and made_by.startswith("fuse "):
            placed[made_by.removeprefix("fuse ")] += count
    return dict(sorted(placed.items()))


def _once(
    run: Callable[[StepGraph, Plan], StepGraph], asked: Hashable, step: StepGraph, plan: Plan
) -> StepGraph:
    """A pass that depends on the step and `asked` alone: its result is kept for other plans."""
    key = (run.__name__, asked)
    if key not in step.derived:
        step.derived[key] = run(step, plan)
    return step.derived[key]


def _assembled(step: StepGraph, made: Rewritten) -> StepProgram:
    forward, backward = set(), set()
    for program in made.programs:
        for value in program.forward_inputs:
            if value.kind == "received":
                forward.add((value.peers[0], program.stage))
        for value in program.backward_inputs:
            if value.kind == "received":
                backward.add((value.peers[0], program.stage))
    prologue = made.local.prologue
    places = list(zip(step.outputs, made.local.output_places, strict=True))
    loss = [p == PARTIAL for o, p in places if o.kind == "loss"]
    return StepProgram(
        tuple(_boxed(p) for p in made.programs),
        None if prologue is None else replace(prologue, graph=boxed(prologue.graph)),
        frozenset(forward),
        frozenset(backward),
        bool(loss and loss[0]),
        made.shared,
        {o.leaf: p for o, p in places if o.kind == "output"},
        made.random,
        input_places={o.leaf: p for o, p in places if o.kind == "input_gradient"},
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
    backwards = {moment: boxed(graph) for moment, graph in program.backwards.items()}
    weights = {moment: boxed(graph) for moment, graph in program.weights.items()}
    prepare = None if program.prepare is None else boxed(program.prepare)
    return replace(
        program,
        forward=boxed(program.forward),
        backwards=backwards,
        weights=weights,
        prepare=prepare,
        head=None if program.head is None else boxed(program.head),
    )
