"""Recompute casts of parameters, and views of sharded parameters, in the backward.

before                                    after (w is sharded at rest)
  %t: = aten.t(%w)          # forward       %t: = aten.t(%w)          # forward
  %y: = aten.mm(%x, %t)     # forward       %y: = aten.mm(%x, %t)     # forward
  %s: = aten.t(%t)          # backward      %t_again: = aten.t(%w)    # backward
  %d: = aten.mm(%g, %s)     # backward      %s: = aten.t(%t_again)    # backward
                                            %d: = aten.mm(%g, %s)     # backward

Saved for the backward, a view would keep the gathered parameter alive; a cast would be saved once
for each microbatch in flight. This pass runs before the cut into phases, so that each phase reads
the parameter itself.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from graphaccel.ir.calls import is_random
from graphaccel.sharding.rules.ops.collectives import is_message


def recompute_casts(graph: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Rewrite a joint graph in place. names: of the placeholders of the parameters concerned."""
    if not names:
        return graph
    clones: dict[fx.Node, fx.Node] = {}
    derived: set[fx.Node] = set()
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        if len(sources) == 1 and not is_random(node) and not is_message(node.target):
            source = sources[0]
            own = source.op == "placeholder" and source.name in names
            if (own or source in derived) and node.meta.get("phase") == "forward":
                derived.add(node)
        if node.meta.get("phase") != "backward" or node.meta.get("head"):
            continue
        for source in sources:
            if source in derived:
                node.replace_input_with(source, _copied(source, node, derived, clones))
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph


def _copied(
    node: fx.Node, before: fx.Node, derived: set[fx.Node], clones: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A copy of `node` for the backward, with the nodes it depends on."""
    if node in clones:
        return clones[node]
    chain = [node]
    while chain[-1].all_input_nodes[0] in derived and chain[-1].all_input_nodes[0] not in clones:
        chain.append(chain[-1].all_input_nodes[0])
    for link in reversed(chain):
        with before.graph.inserting_before(before):
            clone = before.graph.node_copy(link, lambda n: clones.get(n, n))
        clone.meta = {**link.meta, "phase": "backward", "made_by": "recompute_casts"}
        clones[link] = clone
    return clones[node]
