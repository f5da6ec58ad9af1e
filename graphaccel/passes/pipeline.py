"""The list of passes in the order in which they run, each with the reason for its place.

`PIPELINE` is the list, read from top to bottom; `build` runs it. A pass is described in its own
file; its decisions are in the plan. `passes.replication.replicated` runs the list once for
identical layers and stages; without such ones every pass runs once, in this order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.program import Sharded, StageProgram, StepProgram
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.passes import adapters
from graphaccel.passes.assemble import assembled, boxed_program
from graphaccel.passes.context import Context, Fixed, Sizes, graphs_of
from graphaccel.passes.gradients.accumulate_gradients import accumulate_gradients
from graphaccel.passes.gradients.prune_output_gradients import prune_output_gradients
from graphaccel.passes.place_ort import Tools, region_models
from graphaccel.passes.replication.replicated import run_replicated
from graphaccel.passes.runner import Pass, Runner
from graphaccel.planner.plan.plan import Plan

PIPELINE: tuple[Pass, ...] = (
    # The captured step: its forward graph is rewritten, then differentiated anew.
    Pass(
        "lower_precision", "step", adapters.run_lower_precision,
        "on the forward graph: autograd then derives the casts of the backward",
    ),
    Pass(
        "fuse", "step", adapters.run_fuse,
        "after the casts, which patterns have to see; before differentiation, so that one pattern "
        "per kernel is enough",
    ),
    Pass(
        "synchronise_batch_norm", "step", adapters.run_synchronise_batch_norm,
        "before differentiation, for the same reason",
    ),
    Pass(
        "drop_backward", "step", adapters.run_drop_backward,
        "an evaluation has nothing to differentiate, so the other passes see no backward",
        exact=True,
    ),
    # The joint graph of the batch becomes that of one rank.
    Pass(
        "exact_microbatch", "rank", adapters.run_exact_microbatch,
        "sizes shrink here: everything later sees one microbatch of one data rank",
    ),
    Pass(
        "shard_axes", "rank", adapters.run_shard_axes,
        "local shapes and collectives of the tensor, context and expert axes: on one microbatch of "
        "one data rank, and while the graph is still one",
    ),
    # The joint graph of one rank, before it is cut into stages.
    Pass(
        "recompute", "joint", adapters.run_recompute,
        "before the cut, so that a stage owns its clones",
        exact=True,
    ),
    Pass(
        "recompute_casts", "joint", adapters.run_recompute_casts,
        "before the cut, as recompute, for casts and views of parameters",
        exact=True,
    ),
    Pass(
        "decompose", "joint", adapters.run_decompose,
        "after what looks for whole calls; before choose_saved, which chooses between simple ones",
    ),
    Pass(
        "merge_equal", "joint", adapters.run_merge_equal,
        "after decompose: only simple calls of the forward recur in the backward",
        exact=True,
    ),
    Pass(
        "choose_saved", "joint", adapters.run_choose_saved,
        "before the cut and the phases: what a stage saves is then in its programs, by which its "
        "memory is counted",
        exact=True,
    ),
    Pass(
        "cut_stages", "joint", adapters.run_cut_stages,
        "needs the final joint graph",
    ),
    Pass(
        "scatter_sends", "joint", adapters.run_scatter_sends,
        "needs to know what crosses a cut; before the phases, whose values are sent",
        exact=True,
    ),
    # The programs of stages: a forward and a backward each.
    Pass(
        "split_phases", "program", adapters.run_split_phases,
        "needs stages: what is saved is decided one stage at a time",
        exact=True,
    ),
    Pass(
        "two_pass_head", "program", adapters.run_two_pass_head,
        "on the backward of the last stage, before it is divided further",
        exact=True,
    ),
    Pass(
        "split_weights", "program", adapters.run_split_weights,
        "where the schedule has weights apart: what follows sees two backwards",
        exact=True,
    ),
    Pass(
        "place_ort", "program", adapters.run_place_ort,
        "after the split, so that no region spans two stages or two phases; before the sums, which "
        "write in place",
    ),
    Pass(
        "chunk_loss", "program", adapters.run_chunk_loss,
        "changes one number of a call, which has to be in its final place",
    ),
    Pass(
        "select_matmul_backend", "program", adapters.run_select_matmul_backend,
        "sizes and dtypes are final; before the sums, which let the other matmuls write into "
        "buckets",
    ),
    Pass(
        "wide_gradients", "program", adapters.run_wide_gradients,
        "after the split, which tells what is a gradient; before the sums, which are in float32",
    ),
    Pass(
        "overlap_collectives", "program", adapters.run_overlap_collectives,
        "moves calls, so before what writes in place; after the split, or work would move from one "
        "phase into the other",
        exact=True,
    ),
    Pass(
        "offload_activations", "program", adapters.run_offload_activations,
        "what is saved is final, and calls are in their final order; before parameters are "
        "gathered, which are no activations",
        exact=True,
    ),
    Pass(
        "shard_gradients", "program", adapters.run_shard_gradients,
        "gradients are final; before the two passes that sum them, each its own kind",
        exact=True,
    ),
    Pass(
        "gather_once", "program", adapters.run_gather_once,
        "before gather_parameters, which leaves out what is gathered once per step",
        exact=True,
    ),
    Pass(
        "gather_parameters", "program", adapters.run_gather_parameters,
        "one phase at a time: it needs to know the first and the last use",
        exact=True,
    ),
    Pass(
        "cast_parameters_once", "program", adapters.run_cast_parameters_once,
        "after both: what they gather is no longer a parameter of the graph",
        exact=True,
    ),
    Pass(
        "group_casts", "program", adapters.run_group_casts,
        "after cast_parameters_once, whose casts it groups too",
        exact=True,
    ),
    Pass(
        "upload_parameters", "program", adapters.run_upload_parameters,
        "after gather_parameters, whose shards it copies to the device; no call moves after it",
        exact=True,
    ),
    # The sums of gradients, over microbatches and over ranks.
    Pass(
        "accumulate_gradients", "sums", adapters.run_accumulate_gradients,
        "late: it brings in-place ops, after which nothing may be moved",
    ),
    Pass(
        "reduce_shards", "sums", adapters.run_reduce_shards,
        "last, for the same reason: it makes a graph for the same moments of the step",
    ),
)  # fmt: skip
"""`prune_output_gradients` is not among them: which outputs a loss outside of the graph reads is
known when that loss is differentiated (`backward_of`)."""


def build(
    step: StepGraph,
    plan: Plan,
    *,
    sizes: Sizes | None = None,
    homes: Mapping[str, tuple[int, ...]] | None = None,
    gradients: bool = True,
    parameter_shards: Mapping[str, tuple[Sharded, ...]] | None = None,
    groups: tuple[tuple[str, ...], ...] | None = None,
    ranks: int | None = None,
    ort: Tools | None = None,
    device: str = "cpu",
) -> StepProgram:
    """Rewrite a captured step as the plan says: one program a stage.

    sizes: symbol sizes of the batch that will be passed, where they differ from the capture's.
    homes: stages of parameters that are already stored. gradients: False for a forward alone.
    parameter_shards: how parameters are already sharded, where another program of theirs runs.
    groups: the groups in which those sharded over data are stored. ranks: over which ZeRO shards,
    for an evaluation, whose plan has no data axis. ort: what placing ONNX Runtime regions needs,
    where the plan has some. device: the type of device that runs it, as "cuda".

    Raises: BadPin (GA202), SplitRefused (GA207), TooManyStages (GA203).
    """
    run = Runner(plan, PIPELINE)
    fixed = Fixed(homes, parameter_shards, groups, ranks)
    context = run_replicated(run, Context(step, plan, sizes, gradients, fixed, ort, device=device))
    for name, content in region_models(context.programs).items():
        run.write(f"{name}.onnx", content)
    for program in context.programs:
        for name, graph in graphs_of(program).items():
            run.dump(f"stage_{program.stage}_{name.replace(' ', '_')}", graph)
    return assembled(context)


def prepared(step: StepGraph, plan: Plan) -> StepGraph:
    """The step in the plan's precision and with its fusions: what the planner works on."""
    return adapters.run_fuse(adapters.run_lower_precision(Context(step, plan))).step


def placed_fusions(step: StepGraph, plan: Plan) -> dict[str, int]:
    """How often `build` places each of the plan's fusions, by name."""
    placed: Counter[str] = Counter()
    for node, count in distinct_nodes(prepared(step, plan).forward.graph):
        built_by = str(node.meta.get("made_by"))
        if node.meta.get("covers") and built_by.startswith("fuse "):
            placed[built_by.removeprefix("fuse ")] += count
    return dict(sorted(placed.items()))


def backward_of(program: StepProgram, plan: Plan, used: frozenset[int]) -> StageProgram:
    """The stage with the backward of a loss that reads the output leaves `used` alone.

    For a program whose loss is outside of the graph. Parameters and batch leaves that such a loss
    does not reach have no gradient in it.
    """
    assert program.bare is not None
    if used == frozenset(program.tangents):
        return program.stages[0]
    pruned = prune_output_gradients(program.bare, used)
    return boxed_program(accumulate_gradients(pruned, plan, program.partial))
