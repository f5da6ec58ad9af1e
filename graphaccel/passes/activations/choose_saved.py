"""Choose value by value what the forward saves, and recompute the rest in the backward.

before                                       after
  %a: = aten.mul(%x, 0.7)      # forward       %a: = aten.mul(%x, 0.7)      # forward
  %t: = aten.tanh(%a)                          %t: = aten.tanh(%a)
  %y: = aten.mm(%t, %w)                        %y: = aten.mm(%t, %w)
  %d: = aten.mul(%g, %t)       # backward      %a_1: = aten.mul(%x, 0.7)    # backward
                                               %t_1: = aten.tanh(%a_1)
                                               %d: = aten.mul(%g, %t_1)

The choice is torch's own min-cut (`torch.compile` makes it too): the fewest bytes that are written
in the forward and read in the backward, where what can be fused into the reader costs nothing to
compute. Never recomputed: matmuls and other calls that cannot be fused, random draws,
collectives, and what another stage reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from graphaccel.compat.torch.partition import min_cut, must_save
from graphaccel.ir.calls import is_random
from graphaccel.ir.values import returned
from graphaccel.passes.activations.recompute import clone_before
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.rules.ops.collectives import is_message

_NAME = "choose_saved"


def choose_saved(graph: fx.GraphModule, plan: Plan, positions: Mapping[str, int]) -> fx.GraphModule:
    """Rewrite a joint graph in place; values and gradients stay bitwise the same.

    positions: forward-graph node name → its place, by which the plan's cuts make stages.
    """
    ends = sorted(positions[name] for name in plan.cuts)

    def stage(node: fx.Node) -> int:
        place = positions.get(node.meta.get("origin", ""), 0)
        return sum(place > end for end in ends)

    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    backward = {n for n in calls if n.meta.get("phase") == "backward"}
    if not backward:  # nothing is trained
        return graph
    fixed = [n for n in calls if n not in backward and _is_fixed(n, stage(n), stage)]
    for node in fixed:
        node.meta["recompute"] = must_save()
    results = [n for n in returned(graph) if isinstance(n, fx.Node) and n not in backward]
    saved = min_cut(graph.graph, backward, results)
    for node in fixed:
        del node.meta["recompute"]
    free = {n for n in calls if n not in backward and n not in saved and n not in fixed}
    clones: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if node not in backward or node.meta.get("head"):
            continue
        for source in node.all_input_nodes:
            if source in free:
                node.replace_input_with(source, clone_before(source, node, free, clones, _NAME))
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph


def _is_fixed(node: fx.Node, own: int, stage: Callable[[fx.Node], int]) -> bool:
    """Whether a value of the forward must not be recomputed: of a random draw or a collective,
    or of another stage than one of its readers, or for what runs once a step."""
    if is_random(node) or is_message(node.target) or node.meta.get("head"):
        return True
    return any(user.op != "output" and stage(user) != own for user in node.users)
