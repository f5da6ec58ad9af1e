"""Overlap communication: issue each collective when its input is ready, wait at its first use.

before                                       after
  %gx = aten.mm(%g, %w)                        %gx = aten.mm(%g, %w)
  %gt = aten.t(%g)                             %sent = all_reduce(%gx, sum, tensor)
  %gw = aten.mm(%gt, %x)                       %gt = aten.t(%g)
  %sent = all_reduce(%gx, sum, tensor)         %gw = aten.mm(%gt, %x)
  %here = wait_tensor(%sent)                   %here = wait_tensor(%sent)
  %y = aten.mul(%here, %z)                     %y = aten.mul(%here, %z)

So the gradients of a layer's weights are computed while the gradient of its input is in flight.
Nodes that do not lead to a collective move after it, but only once: a matmul that moved from
collective to collective would keep its operands alive until the end of the backward. A wait is no
later than the wait for a later collective on the same axis. Random numbers are drawn in their
original order. All ranks of an axis have the same graph, so they issue in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch
from torch import fx

from graphaccel.ir.calls import is_random
from graphaccel.ir.program import StageProgram
from graphaccel.planner.profile.cost import is_view
from graphaccel.sharding.rules.ops import collectives

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ISSUES = frozenset(collectives.RULES) - {_WAIT}


def overlap_collectives(program: StageProgram) -> StageProgram:
    """The program with compute between each collective and its wait, where there is some."""
    for module in (program.forward, *program.backwards.values()):
        graph = module.graph
        if not any(n.target in _ISSUES for n in graph.nodes):
            continue
        nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
        for node in _waiting_late(_issued_early(nodes)):
            last.append(node)
            last = node
        graph.lint()
        module.recompile()
    return program


def _issued_early(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes between the previous collective and this one that it does not send are moved after
    it."""
    order: list[fx.Node] = []
    window: list[fx.Node] = []  # since the last collective
    moved: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and is_random(node):
            order += [*window, node]
            window = []
        elif node.target in _ISSUES:
            needed = _leading_to(node, window)
            before = [n for n in window if n in needed or n in moved]
            window = [n for n in window if n not in needed and n not in moved]
            moved.update(window)
            order += [*before, node]
        else:
            window.append(node)
    return order + window


def _leading_to(node: fx.Node, window: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes of a window that a node depends on."""
    inside, result, stack = set(window), set(), [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in inside and source not in result:
                result.add(source)
                stack.append(source)
    return result


def _waiting_late(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Waits, and views of their results, are moved to where something reads them, or where a later
    collective of their axis is waited for."""
    order: list[fx.Node] = []
    held: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        if node.target is _WAIT:
            for other in _done_before(node, issued, held):
                del held[other]
                order.append(other)
        for source in node.all_input_nodes:
            if source in held:
                del held[source]
                place(source)
        order.append(node)

    issued = {node: i for i, node in enumerate(nodes) if node.target in _ISSUES}
    for node in nodes:
        if node.target is _WAIT or (is_view(node) and any(n in held for n in node.all_input_nodes)):
            held[node] = None
        else:
            place(node)
    for node in list(held):
        if node in held:
            del held[node]
            place(node)
    return order


def _done_before(
    wait: fx.Node, issued: Mapping[fx.Node, int], held: Iterable[fx.Node]
) -> list[fx.Node]:
    """Waits for collectives issued earlier on the same axis: they are complete by then, and their
    inputs can be freed."""
    (sent,) = wait.all_input_nodes
    if sent not in issued:
        return []
    results = []
    for other in held:
        if other.target is _WAIT:
            (earlier,) = other.all_input_nodes
            if issued.get(earlier, inf) < issued[sent] and earlier.args[-1] == sent.args[-1]:
                results.append(other)
    return sorted(results, key=lambda n: issued[n.all_input_nodes[0]])
