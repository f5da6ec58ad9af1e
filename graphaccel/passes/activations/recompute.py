"""Activation checkpointing: recompute activations of chosen blocks in the backward.

before (block h.0 recomputed)                  after
  %a: = aten.gelu(%x)            # forward       %a: = aten.gelu(%x)            # forward
  %y: = aten.mm(%a, %w)                          %y: = aten.mm(%a, %w)
  %d: = aten.mm(%g, %a)          # backward      %a_again: = aten.gelu(%x)      # backward
                                                 %d: = aten.mm(%g, %a_again)

Saved nevertheless: what other blocks read (the blocks' inputs), results of random ops (a mask is
drawn once), and results of collectives other than all-gathers: saving a gathered value would store
on one rank what all of them have (Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, 2022, §4.2.2). In blocks with selective recompute, also the values that the plan
names (Korthikanti et al., §4.1). Each clone is just before its first use, so only one block's
activations are alive at a time. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.calls import is_random
from graphaccel.ir.values import operands
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.block_recompute import block_values
from graphaccel.planner.profile.cost import is_view
from graphaccel.sharding.rules.ops.collectives import is_message

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def recompute(graph: fx.GraphModule, plan: Plan, positions: Mapping[str, int]) -> fx.GraphModule:
    """Rewrite a joint graph in place; values and gradients stay bitwise the same.

    positions: forward-graph node name → its place. Values that cross a cut of the plan are saved,
    or a later stage would need an earlier one to recompute them.
    """
    if not plan.recompute and not plan.selective:
        return graph
    ends = sorted(positions[name] for name in plan.cuts)

    def stage(node: fx.Node) -> int:
        place = positions.get(node.meta.get("origin", ""), 0)
        return sum(place > end for end in ends)

    candidates = _candidates(graph, plan, _saved(graph, plan, positions), stage)
    clones: dict[fx.Node, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.meta.get("phase") != "backward" or node.meta.get("head"):
            continue
        for source in node.all_input_nodes:
            if source in candidates:
                clone = clone_before(source, node, candidates, clones, "recompute")
                node.replace_input_with(source, clone)
    graph.graph.eliminate_dead_code()  # what only the backward read
    graph.graph.lint()
    graph.recompile()
    return graph


def _saved(graph: fx.GraphModule, plan: Plan, positions: Mapping[str, int]) -> set[str]:
    """Nodes of the forward graph whose values the plan saves. Raises KeyError for a value that a
    block does not have."""
    known = block_values(graph.graph.nodes, positions) if plan.selective else {}
    return {
        known[block][label] for own in plan.selective for block in own.blocks for label in own.saved
    }


def _candidates(
    graph: fx.GraphModule, plan: Plan, saved: set[str], stage: Callable[[fx.Node], int]
) -> set[fx.Node]:
    chosen = {*plan.recompute, *(block for own in plan.selective for block in own.blocks)}
    nodes: set[fx.Node] = set()
    leaving = _leaving(graph, stage)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.meta.get("phase") != "forward":
            continue
        if block_of(node.meta.get("module", "")) not in chosen or node in leaving:
            continue
        if is_random(node) or (is_message(node.target) and not _gathers(node)):
            continue
        if node.meta.get("origin") in saved and not (is_view(node) or _gathers(node)):
            continue
        if node.target is operator.getitem and node.args[0] not in nodes:
            continue
        nodes.add(node)
    return nodes


def _leaving(graph: fx.GraphModule, stage: Callable[[fx.Node], int]) -> set[fx.Node]:
    """Values that are read outside their block or stage in the forward, directly or through
    views."""
    nodes: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op != "call_function" or node.meta.get("phase") != "forward":
            continue
        block = block_of(node.meta.get("module", ""))
        if any(
            user.op == "output"
            or (
                user.meta.get("phase") == "forward"
                and block_of(user.meta.get("module", "")) != block
            )
            or stage(user) != stage(node)
            or (user in nodes and is_view(user) and user.args[0] is node)
            for user in node.users
        ):
            nodes.add(node)
    return nodes


def _gathers(node: fx.Node) -> bool:
    """Whether a call is an all-gather, or waits for one."""
    return (operands(node)[0] if node.target is _WAIT else node).target is _GATHER


def clone_before(
    node: fx.Node,
    before: fx.Node,
    candidates: set[fx.Node],
    clones: dict[fx.Node, fx.Node],
    built_by: str,
) -> fx.Node:
    """The clone of `node` for the backward, inserted before `before` with what it needs among
    `candidates` (iterative: chains are long). clones: those made before. made_by: a pass."""
    order: list[fx.Node] = []
    stack = [(node, False)]
    while stack:
        current, ready = stack.pop()
        if current not in candidates or current in clones:
            continue
        if ready:
            if current not in order:
                order.append(current)
        else:
            stack.append((current, True))
            stack += [(n, False) for n in current.all_input_nodes]
    for current in order:
        with before.graph.inserting_before(before):
            clone = before.graph.node_copy(current, lambda n: clones.get(n, n))
        clone.meta = {**current.meta, "phase": "backward", "made_by": built_by}
        clones[current] = clone
    return clones[node]
