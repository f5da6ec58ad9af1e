"""Compute the activations of some blocks again in the backward pass instead of keeping them.

before (block h.0 recomputed)                  after
  %a: = aten.gelu(%x)            # forward       %a: = aten.gelu(%x)            # forward
  %y: = aten.mm(%a, %w)                          %y: = aten.mm(%a, %w)
  %d: = aten.mm(%g, %a)          # backward      %a_again: = aten.gelu(%x)      # backward
                                                 %d: = aten.mm(%g, %a_again)

Kept all the same: what other blocks read (the blocks' inputs), what random ops give (a mask is
drawn once), and what collectives give, but for gathers: a rank would keep what all of them have
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, §4.2.2).
Each clone stands just before its first use, so one block's activations live at a time.
Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx

from graphaccel.capture.blocks import block_of
from graphaccel.planner.plan import Plan
from graphaccel.rules.collectives import is_message
from graphaccel.rules.propagate import is_random

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def recompute(graph: fx.GraphModule, plan: Plan, positions: Mapping[str, int]) -> fx.GraphModule:
    """Rewrite a joint graph in place; values and gradients stay bitwise the same.

    positions: forward-graph node name → its place: what crosses a cut of the plan is kept, or a
    later stage would have to ask an earlier one to compute again.
    """
    chosen = set(plan.recompute)
    if not chosen:
        return graph
    ends = sorted(positions[name] for name in plan.cuts)

    def stage(node: fx.Node) -> int:
        place = positions.get(node.meta.get("origin", ""), 0)
        return sum(place > end for end in ends)

    candidates = _candidates(graph, chosen, stage)
    clones: dict[fx.Node, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.meta.get("phase") != "backward":
            continue
        for source in node.all_input_nodes:
            if source in candidates:
                node.replace_input_with(source, _clone(source, node, candidates, clones))
    graph.graph.eliminate_dead_code()  # what only the backward read
    graph.graph.lint()
    graph.recompile()
    return graph


def _candidates(
    graph: fx.GraphModule, chosen: set[str], stage: Callable[[fx.Node], int]
) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.meta.get("phase") != "forward":
            continue
        block = block_of(node.meta.get("module", ""))
        if block not in chosen or _kept(node, block, stage):
            continue
        if node.target is operator.getitem and node.args[0] not in found:
            continue
        found.add(node)
    return found


def _kept(node: fx.Node, block: str, stage: Callable[[fx.Node], int]) -> bool:
    """Random or communicating ops, but for gathers, and values that leave the block or the stage in
    the forward."""
    if is_random(node) or (is_message(node.target) and not _gathers(node)):
        return True
    return any(
        user.op == "output"
        or (user.meta.get("phase") == "forward" and block_of(user.meta.get("module", "")) != block)
        or stage(user) != stage(node)
        for user in node.users
    )


def _gathers(node: fx.Node) -> bool:
    """Whether a call gathers, or waits for what is gathered."""
    return (node.args[0] if node.target is _WAIT else node).target is _GATHER


def _clone(
    node: fx.Node, before: fx.Node, candidates: set[fx.Node], clones: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The clone of `node`, made before `before` with everything it needs (iterative: chains are
    long)."""
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
        clone.meta = {**current.meta, "phase": "backward", "made_by": "recompute"}
        clones[current] = clone
    return clones[node]
