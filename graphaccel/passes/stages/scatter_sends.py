"""Send values that are replicated over the tensor axis in parts, and all-gather them.

before (stage 0 → 1, tensor axis of 2)            after
  %h: f32[8,64] = aten.add(%x, %y)                  %h: f32[8,64] = aten.add(%x, %y)
  --- sent ---                                      %part: f32[256] = aten.narrow(%h, 0, rank * 256)
  %z: f32[8,64] = aten.mul(%h, %w)                  --- sent ---
                                                    %gather: f32[512] = all_gather(%part, tensor)
                                                    %z: f32[8,64] = aten.mul(%gather, %w)

Links between nodes are slow and links inside a node are fast; this sends less over the slow ones.
Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, section 4.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.passes.stages.cut_stages import StagedGraph
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.graph_builder import Emitter
from graphaccel.sharding.rules.batch_placement import REPLICATED
from graphaccel.sharding.rules.shard import Shard

aten = torch.ops.aten
_AXIS = "tensor"
_PART = Shard(0)


def scatter_sends(staged: StagedGraph, plan: Plan) -> StagedGraph:
    """The stages with such sends in parts, where the plan says so (`Plan.scatter_sends`).

    A value is sent whole where it is not replicated (meta "replicated", set by
    `passes.shard_axes`), where its elements cannot be divided evenly, and where it is not dense in
    memory.
    """
    if not plan.scatter_sends or plan.tensor == 1 or staged.stages == 1:
        return staged
    graph, stage = staged.graph.graph, dict(staged.stage)
    place = {node: i for i, node in enumerate(graph.nodes)}
    emit = Emitter(graph, _AXIS, plan.tensor, "scatter_sends")
    with fake_mode_of(list(graph.find_nodes(op="placeholder"))), torch.no_grad():
        for node, own in staged.stage.items():
            readers = _readers(node, staged.stage)
            if not readers or not _even(node, plan.tensor):
                continue
            emit.meta = node.meta
            dims = _dims_by_stride(node)
            with graph.inserting_before(node.next):
                part = _part(emit, node, dims)
            stage |= dict.fromkeys(_chain(part, node), own)
            for there, users in readers.items():
                ahead = [u for u in users if u.meta["phase"] == node.meta["phase"]]
                first = min(ahead, key=place.__getitem__) if ahead else part.next
                with graph.inserting_before(first):
                    whole = _gathered(emit, part, node, dims)
                stage |= dict.fromkeys(_chain(whole, part), there)
                for user in users:
                    user.replace_input_with(node, whole)
    graph.lint()
    staged.graph.recompile()
    return replace(staged, stage=stage)


def _readers(node: fx.Node, stage: dict[fx.Node, int]) -> dict[int, list[fx.Node]]:
    """Readers on other stages that the value is sent to: later stages in the forward, earlier ones
    in the backward."""
    results: dict[int, list[fx.Node]] = defaultdict(list)
    ahead = node.meta["phase"] == "forward"
    for user in node.users:
        there = stage.get(user, stage[node])
        if there > stage[node] if ahead else there < stage[node]:
            results[there].append(user)
    return results


def _even(node: fx.Node, ranks: int) -> bool:
    """Whether every rank has the value, dense in memory, and can take an equal part of it."""
    value = node.meta["val"]
    if not node.meta.get("replicated") or not isinstance(value, torch.Tensor):
        return False
    filled = value.permute(_dims_by_stride(node)).is_contiguous()
    return filled and value.numel() > 0 and value.numel() % ranks == 0


def _dims_by_stride(node: fx.Node) -> list[int]:
    """The dims in the order of their strides."""
    value = node.meta["val"]
    return sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))


def _part(emit: Emitter, node: fx.Node, dims: Sequence[int]) -> fx.Node:
    """This rank's part, in its own storage: the rest is freed before it is sent."""
    if list(dims) != sorted(dims):
        node = emit.call(aten.permute.default, node, list(dims))
    flat = emit.call(aten.reshape.default, node, [node.meta["val"].numel()])
    return emit.call(aten.clone.default, emit.convert(flat, REPLICATED, _PART))


def _gathered(emit: Emitter, part: fx.Node, like: fx.Node, dims: Sequence[int]) -> fx.Node:
    """All parts, gathered in the layout of the original value."""
    shape = like.meta["val"].shape
    flat = emit.convert(part, _PART, REPLICATED)
    whole = emit.call(aten.reshape.default, flat, [shape[d] for d in dims])
    if list(dims) == sorted(dims):
        return whole
    return emit.call(aten.permute.default, whole, [dims.index(d) for d in range(len(dims))])


def _chain(last: fx.Node, first: fx.Node) -> Iterator[fx.Node]:
    """The calls that compute `last` from `first`, without `first`."""
    while last is not first:
        yield last
        (last,) = last.all_input_nodes
