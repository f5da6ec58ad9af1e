"""Merge calls of the joint graph that compute the same value, for `choose_saved` to see one value.

before                                              after
  %a: = aten.sub(%x, %mean)      # forward            %a: = aten.sub(%x, %mean)      # forward
  %b: = aten.sub(%x, %mean)      # backward           %d: = aten.mul(%g, %a)         # backward
  %d: = aten.mul(%g, %b)         # backward

A decomposed norm computes its normalized input in the forward, and again in the backward. As one
value it can be what is saved, in place of the operands. What a pass recomputes on purpose stays,
and so do draws, messages, results, what two stages compute, and views of parameters and inputs,
which take no memory while one that is saved keeps a parameter from the host on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch.ops import is_view, written_arguments
from graphaccel.ir.calls import is_random
from graphaccel.ir.values import returned
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.rules.ops.collectives import is_message

_ON_PURPOSE = ("recompute", "recompute_casts")


def merge_equal(graph: fx.GraphModule, plan: Plan, positions: Mapping[str, int]) -> fx.GraphModule:
    """Rewrite a joint graph in place; values stay bitwise the same.

    positions: forward-graph node name → its place, by which the plan's cuts make stages.
    """
    ends = sorted(positions[name] for name in plan.cuts)
    kept, known = _results(graph), dict[Hashable, fx.Node]()
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node in kept or not _is_plain(node):
            continue
        place = positions.get(node.meta.get("origin", ""), 0)
        key = sum(place > end for end in ends), *_key(node)
        same = known.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return graph


def _results(graph: fx.GraphModule) -> set[fx.Node]:
    """What the graph returns, and what that may be a view of: each has memory of its own."""
    waiting = [n for n in returned(graph) if isinstance(n, fx.Node)]
    results: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in results:
            results.add(node)
            waiting += node.all_input_nodes if is_view(node) else ()
    return results


def _is_plain(node: fx.Node) -> bool:
    if node.meta.get("made_by") in _ON_PURPOSE or node.meta.get("head"):
        return False
    if is_view(node) and all(n.op == "placeholder" for n in node.all_input_nodes):
        return False
    return not (is_random(node) or is_message(node.target) or written_arguments(node))


def _key(node: fx.Node) -> tuple[Hashable, ...]:
    """Equal for calls of the same op with the same arguments, by node and by type and value."""
    numbers: dict[fx.Node, str] = {}

    def shown(value: fx.Node) -> Any:
        return numbers.setdefault(value, f"<{value.name}>")

    given = map_arg((node.args, dict(node.kwargs)), shown)
    value = node.meta.get("val")
    layout = value.stride() if isinstance(value, torch.Tensor) else ()
    return node.target, repr(given), layout
