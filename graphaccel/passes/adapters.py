"""Adapters from passes to contexts: which part of the context each pass reads and replaces.

`pipeline.PIPELINE` lists them. A pass is described in its own file; its decisions are in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.program import StageProgram
from graphaccel.passes.activations.choose_saved import choose_saved
from graphaccel.passes.activations.merge_equal import merge_equal
from graphaccel.passes.activations.offload_activations import offload_activations
from graphaccel.passes.activations.recompute import recompute
from graphaccel.passes.context import Context
from graphaccel.passes.decompose import decompose
from graphaccel.passes.drop_backward import drop_backward
from graphaccel.passes.fusion.fuse import fuse
from graphaccel.passes.gradients.accumulate_gradients import accumulate_gradients
from graphaccel.passes.gradients.reduce_shards import reduce_shards
from graphaccel.passes.gradients.shard_gradients import shard_gradients
from graphaccel.passes.gradients.wide_gradients import wide_gradients
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.microbatch.chunk_loss import chunk_loss
from graphaccel.passes.microbatch.exact_microbatch import LocalStep, exact_microbatch
from graphaccel.passes.microbatch.synchronise_batch_norm import synchronise_batch_norm
from graphaccel.passes.microbatch.two_pass_head import two_pass_head
from graphaccel.passes.overlap_collectives import overlap_collectives
from graphaccel.passes.parameters.cast_parameters_once import cast_parameters_once
from graphaccel.passes.parameters.gather_once import gather_once
from graphaccel.passes.parameters.gather_parameters import gather_parameters
from graphaccel.passes.parameters.group_casts import group_casts
from graphaccel.passes.parameters.parameter_groups import ShardedParameters
from graphaccel.passes.parameters.recompute_casts import recompute_casts
from graphaccel.passes.parameters.upload_parameters import upload_parameters
from graphaccel.passes.place_ort import place_ort
from graphaccel.passes.select_matmul_backend import select_matmul_backend
from graphaccel.passes.shard_axes import shard_axes
from graphaccel.passes.stages.cut_stages import cut_stages
from graphaccel.passes.stages.scatter_sends import scatter_sends
from graphaccel.passes.stages.split_phases import split_phases
from graphaccel.passes.stages.split_weights import split_weights, with_weights
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.zero import owned_shards
from graphaccel.sharding.apply.local_graph import LocalGraph

_CAST = torch.ops.aten._to_copy.default


# ---- the step


def run_lower_precision(c: Context) -> Context:
    """Runs once for all plans of this precision."""
    return _rewritten(c, lower_precision, c.plan.precision)


def run_fuse(c: Context) -> Context:
    """Runs once for all plans with these fusions, on a step in the plan's precision."""
    return _rewritten(c, fuse, (c.plan.fusions, c.plan.outputs))


def run_synchronise_batch_norm(c: Context) -> Context:
    """Sums the batch norms of the step over the data axis."""
    return _rewritten(c, synchronise_batch_norm, (c.plan.data > 1, c.plan.precision.scaled))


def run_drop_backward(c: Context) -> Context:
    """Only where no gradients are wanted; once for all plans."""
    return c if c.gradients else _rewritten(c, drop_backward, ())


# ---- one rank


def run_exact_microbatch(c: Context) -> Context:
    """The step's graph → that of one microbatch."""
    return replace(c, local=exact_microbatch(c.step, c.plan, c.sizes))


def run_shard_axes(c: Context) -> Context:
    """The graph of one microbatch → that of one rank."""
    axes = shard_axes(c.part.graph, c.step, c.plan)
    return of_rank(c, c.part, axes)


def of_rank(c: Context, local: LocalStep, axes: LocalGraph) -> Context:
    """The context with the graph of one rank, and what ZeRO shards there."""
    owned, unsharded = owned_shards(c.step, c.plan, axes.parameter_shards, c.fixed.ranks)
    return replace(c, local=local, axes=axes, owned=owned, unsharded=unsharded)


# ---- the joint graph of one rank


def run_recompute(c: Context) -> Context:
    """In place, on the joint graph."""
    return _in_graph(c, recompute(c.rank.graph, c.plan, c.step.positions))


def run_recompute_casts(c: Context) -> Context:
    """In place; for parameters that are gathered, cast or copied to the device in each phase. With
    one microbatch a min-cut decides about casts."""
    offloaded = "parameters" in c.plan.offload
    casts = not c.plan.min_cut or c.plan.microbatches > 1
    names = {
        node.name
        for name, node in c.parameters.items()
        if offloaded
        or (name in c.owned and c.owned[name].level == 3)
        or (casts and any(user.target is _CAST for user in node.users))
    }
    return _in_graph(c, recompute_casts(c.rank.graph, names))


def run_decompose(c: Context) -> Context:
    """In place, where a min-cut follows."""
    return _in_graph(c, decompose(c.rank.graph)) if c.plan.min_cut and c.gradients else c


def run_merge_equal(c: Context) -> Context:
    """In place, where a min-cut follows."""
    if not (c.plan.min_cut and c.gradients):
        return c
    return _in_graph(c, merge_equal(c.rank.graph, c.plan, c.step.positions))


def run_choose_saved(c: Context) -> Context:
    """In place, where the plan says so."""
    if not (c.plan.min_cut and c.gradients):
        return c
    return _in_graph(c, choose_saved(c.rank.graph, c.plan, c.step.positions))


def run_cut_stages(c: Context) -> Context:
    """The joint graph → the stage of each of its nodes."""
    prologue, step = c.part.prologue, c.step
    everywhere = () if prologue is None else prologue.buffers
    staged = cut_stages(
        c.rank.graph, step.inputs, step.outputs, step.positions, c.plan.cuts, c.fixed.homes,
        everywhere,
    )  # fmt: skip
    shared = {name: at for name, at in staged.homes.items() if len(at) > 1}
    return replace(c, staged=staged, shared=shared)


def run_scatter_sends(c: Context) -> Context:
    """In place, on the staged graph."""
    return replace(c, staged=scatter_sends(c.stages, c.plan))


# ---- the programs of stages


def run_split_phases(c: Context) -> Context:
    """The joint graph → one program a stage."""
    return replace(c, programs=split_phases(c.stages, c.outlined))


def run_two_pass_head(c: Context) -> Context:
    """Only where part of the step runs once on the whole batch."""
    return replace(c, programs=two_pass_head(c.programs)) if c.part.headed else c


def run_split_weights(c: Context) -> Context:
    """Moves the gradients of parameters to programs of their own."""
    programs, weights = split_weights(c.programs, c.plan)
    return replace(c, programs=programs, weights=weights)


def run_place_ort(c: Context) -> Context:
    """Adds a report of what was placed."""
    programs, report = place_ort(c.programs, c.plan, c.ort)
    return replace(c, programs=programs, report=report)


def run_chunk_loss(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: chunk_loss(program, c.plan))


def run_select_matmul_backend(c: Context) -> Context:
    """On each program alone, including the separate weight-gradient programs; what runs on a GPU
    has none of oneDNN's ops."""
    if c.device != "cpu":
        return c
    weights = tuple(select_matmul_backend(program) for program in c.weights)
    return replace(_each(c, select_matmul_backend), weights=weights)


def run_wide_gradients(c: Context) -> Context:
    """On each program alone, including the separate weight-gradient programs."""
    weights = tuple(wide_gradients(program, c.plan) for program in c.weights)
    return replace(_each(c, lambda program: wide_gradients(program, c.plan)), weights=weights)


def run_overlap_collectives(c: Context) -> Context:
    """On each program alone."""
    return _each(c, overlap_collectives)


def run_offload_activations(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: offload_activations(program, c.plan))


def run_shard_gradients(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: shard_gradients(program, c.owned))


def run_gather_once(c: Context) -> Context:
    """On each program alone, where the plan gathers parameters once a step."""
    if c.plan.reshard_after_forward != "once_per_step":
        return c
    sharded = _sharded_parameters(c)
    return _each(c, lambda program: gather_once(program, c.plan, sharded))


def run_gather_parameters(c: Context) -> Context:
    """On each program alone, except those whose parameters are gathered once a step."""
    sharded, last = _sharded_parameters(c), c.stages.stages - 1

    def run(program: StageProgram) -> StageProgram:
        if program.prepare is not None:
            return program
        return gather_parameters(program, c.plan, sharded, last=program.stage == last)

    return _each(c, run)


def _sharded_parameters(c: Context) -> ShardedParameters:
    ranks = c.fixed.ranks or c.plan.shards
    return ShardedParameters(c.owned, ranks, c.values, c.shared, c.fixed.groups)


def run_cast_parameters_once(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: cast_parameters_once(program, c.plan))


def run_group_casts(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: group_casts(program, c.plan))


def run_upload_parameters(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: upload_parameters(program, c.plan))


# ---- the sums of gradients


def run_accumulate_gradients(c: Context) -> Context:
    """On each program alone; weight-gradient programs, now final, join the program of their
    stage."""
    partial = c.rank.partial
    built = _each(c, lambda program: accumulate_gradients(program, c.plan, partial))
    if c.weights:
        weights = [accumulate_gradients(program, c.plan, partial) for program in c.weights]
        pairs = zip(built.programs, weights, strict=True)
        built = replace(built, programs=tuple(with_weights(p, w) for p, w in pairs), weights=())
    return replace(built, unsummed=c.programs)


def run_reduce_shards(c: Context) -> Context:
    """On each program alone."""
    return _each(c, lambda program: reduce_shards(program, c.plan, c.owned, c.rank.partial))


# ---- helpers


def _rewritten(c: Context, run: Callable[[StepGraph, Plan], StepGraph], asked: Hashable) -> Context:
    """A pass that depends on the step and `asked` alone: its result is reused for other plans."""
    return replace(c, step=c.step.analyses.cached(asked, run, c.step, c.plan))


def _in_graph(c: Context, graph: torch.fx.GraphModule) -> Context:
    return replace(c, axes=replace(c.rank, graph=graph))


def _each(c: Context, run: Callable[[StageProgram], StageProgram]) -> Context:
    return replace(c, programs=tuple(run(program) for program in c.programs))
