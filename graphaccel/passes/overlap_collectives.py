"""Collectives issued as soon as what they send is there, and waited for where it is first read.

before                                       after
  %gx = aten.mm(%g, %w)                        %gx = aten.mm(%g, %w)
  %gt = aten.t(%g)                             %sent = all_reduce(%gx, sum, tensor)
  %gw = aten.mm(%gt, %x)                       %gt = aten.t(%g)
  %sent = all_reduce(%gx, sum, tensor)         %gw = aten.mm(%gt, %x)
  %here = wait_tensor(%sent)                   %here = wait_tensor(%sent)
  %y = aten.mul(%here, %z)                     %y = aten.mul(%here, %z)

So the gradients of a layer's weights are computed while that of its input travels. What does not
lead to a collective moves behind it, but only once: a product that went from collective to
collective would keep its operands until the end of the backward. A wait stands no later than that
for what the same axis was sent afterwards. Random numbers are drawn in their order. All ranks of an
axis have the same graph, so they issue in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch
from torch import fx

from graphaccel.ir.calls import is_random
from graphaccel.ir.program import StageProgram
from graphaccel.planner.profile.cost import is_view
from graphaccel.sharding.rules import collectives

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ISSUES = frozenset(collectives.RULES) - {_WAIT}


def overlap_collectives(program: StageProgram) -> StageProgram:
    """The program with work between the issue of each collective and its wait, where there is."""
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
    """What stands between the collective before and this one, and is not sent by it, behind it."""
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
    inside, found, stack = set(window), set(), [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in inside and source not in found:
                found.add(source)
                stack.append(source)
    return found


def _waiting_late(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Waits, and what only looks at what they give, where something reads it, or where a later
    message of their axis is waited for."""
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
    """Waits for what was issued earlier on the same axis: it is there by then, and what it was made
    of can go."""
    (sent,) = wait.all_input_nodes
    if sent not in issued:
        return []
    found = []
    for other in held:
        if other.target is _WAIT:
            (earlier,) = other.all_input_nodes
            if issued.get(earlier, inf) < issued[sent] and earlier.args[-1] == sent.args[-1]:
                found.append(other)
    return sorted(found, key=lambda n: issued[n.all_input_nodes[0]])
