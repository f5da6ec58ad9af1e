"""Partitions a graph into convex regions that can each be replaced by one call.

Views belong to no region: a region has its own copies of those it reads through, and outside they
cost nothing. Every other node has a label (None: it stays outside) and a depth: how often a path to
it changes between labels. The nodes of one label at one depth are a region. A path that leaves it
changes labels, and any node of the label that it reaches later is deeper: so regions are convex,
and an order of them exists.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import networkx as nx
from torch import fx

from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir.values import tensors_of
from graphaccel.ort.translate import draws
from graphaccel.sharding.rules.ops.collectives import is_message

Label: TypeAlias = Callable[[fx.Node], "str | None"]
# Calls with the views they read through, inputs, outputs.
Border: TypeAlias = tuple[list[fx.Node], list[fx.Node], list[fx.Node]]


@dataclass(frozen=True)
class Part:
    """A region (label, and nodes in order), or one node that stays outside (label None).

    nodes: computing ones and the `getitem` that belong to them; no views.
    """

    label: str | None
    nodes: tuple[fx.Node, ...] = field(repr=False)


class Flow:
    """A graph's computing nodes and their inputs, with views traced through."""

    def __init__(self, graph: fx.Graph, is_view: Callable[[fx.Node], bool]) -> None:
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.views: set[fx.Node] = set()
        self.owned: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.computing: list[fx.Node] = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem and node.args[0] not in self.views:
                self.owned[node.args[0]].append(node)
            elif is_view(node):
                self.views.add(node)
            else:
                self.computing.append(node)
        self.owner = {item: node for node, items in self.owned.items() for item in items}
        self.results: list[fx.Node] = list(graph.output_node().all_input_nodes)
        self._fences = _fences(graph, self.views)

    def root(self, node: fx.Node) -> fx.Node:
        """The base of a chain of views; the node itself if it is not a view."""
        while node in self.views:
            node = node.all_input_nodes[0]
        return node

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Computing nodes whose results a node reads, through views, and those it must follow."""
        results = [self.root(n) for n in node.all_input_nodes]
        results = [self.owner.get(n, n) for n in results] + self._fences.get(node, [])
        return [n for n in dict.fromkeys(results) if n.op == "call_function" and n is not node]

    def wanted(self, parts: Iterable[Part]) -> set[fx.Node]:
        """Values that are read outside their own region: bases of what is read."""
        parts = list(parts)
        region = {n: i for i, p in enumerate(parts) if p.label is not None for n in p.nodes}
        results = {self.root(n) for n in self.results}
        for index, part in enumerate(parts):
            for node in part.nodes:
                for source in node.all_input_nodes:
                    root = self.root(source)
                    if part.label is None or region.get(root) != index:
                        results.add(root)
        return results

    def border(self, part: Part, wanted: set[fx.Node]) -> Border:
        """A region's calls with the views they read through, its inputs, and its outputs."""
        own = set(part.nodes)
        nodes: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}
        for node in part.nodes:
            for source in node.all_input_nodes:
                chain = []
                while source in self.views:
                    chain.append(source)
                    source = source.all_input_nodes[0]
                if source not in own:
                    inputs[source] = None
                nodes |= dict.fromkeys(reversed(chain))
            nodes[node] = None
        outputs = [n for n in part.nodes if n in wanted and n not in self.owned]
        return list(nodes), list(inputs), outputs


def fx_graph(
    nodes: Iterable[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> fx.GraphModule:
    """A region as an FX graph of its own, as torch would run it."""
    graph = fx.Graph()
    built = {n: graph.placeholder(n.name) for n in inputs}
    for node, placeholder in built.items():
        placeholder.meta = dict(node.meta)
    for node in nodes:
        built[node] = graph.node_copy(node, lambda n: built[n])
    graph.output([built[n] for n in outputs])
    return fx.GraphModule({}, graph)


def has_effect(node: fx.Node) -> bool:
    """Whether a call draws random numbers, writes to an input or communicates."""
    declared = getattr(node.target, "_schema", None)
    mutable = declared is not None and declared.is_mutable
    return mutable or is_message(node.target) or draws(node)


def written(graph: fx.Graph) -> set[int]:
    """Storages that some call writes to."""
    results: set[int] = set()
    for node in graph.nodes:
        declared = getattr(node.target, "_schema", None)
        if node.op == "call_function" and declared is not None and declared.is_mutable:
            for value in node.all_input_nodes[:1]:
                results |= {storage_key(t) for t in tensors_of(value.meta["val"])}
    return results


def _fences(graph: fx.Graph, views: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each call with effects, or that touches a written storage, the calls it must follow."""
    changed = written(graph)
    fences: dict[fx.Node, list[fx.Node]] = {}
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op != "call_function" or node in views or node.target is operator.getitem:
            continue
        if has_effect(node) or touches(node, changed):
            if previous is not None:
                fences[node] = [previous]
            previous = node
    return fences


def touches(node: fx.Node, storages: set[int]) -> bool:
    """Whether a call reads or creates one of these storages."""
    if not storages:
        return False
    values = [node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes)]
    return any(storage_key(t) in storages for v in values for t in tensors_of(v))


def partition(flow: Flow, label: Label) -> list[Part]:
    """The regions and the nodes outside them, in an order in which they can run."""
    labels = {n: label(n) for n in flow.computing}
    depths = _depths(flow, labels)
    members: dict[tuple[object, int], list[fx.Node]] = defaultdict(list)
    for node in flow.computing:
        own = labels[node]
        members[(own, depths[node]) if own is not None else (node, 0)].append(node)
    place = {n: key for key, nodes in members.items() for n in nodes}
    graph = nx.DiGraph()
    graph.add_nodes_from(members)
    for node in flow.computing:
        for source in flow.sources(node):
            if place[source] != place[node]:
                graph.add_edge(place[source], place[node])
    first = {key: min(flow.order[n] for n in nodes) for key, nodes in members.items()}
    ordered = nx.lexicographical_topological_sort(graph, key=lambda key: first[key])
    return [
        Part(labels[members[key][0]], tuple(_with_items(flow, members[key]))) for key in ordered
    ]


def _with_items(flow: Flow, nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    for node in nodes:
        yield node
        yield from flow.owned.get(node, ())


def _depths(flow: Flow, labels: Mapping[fx.Node, str | None]) -> dict[fx.Node, int]:
    """Depths, as early as possible; then nodes that feed only their own label join their readers'
    depth."""
    depths: dict[fx.Node, int] = {}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in flow.computing:
        sources = flow.sources(node)
        for source in sources:
            readers[source].append(node)
        depths[node] = max((depths[s] + (labels[s] != labels[node]) for s in sources), default=0)
    for node in reversed(flow.computing):
        if labels[node] is None or not readers[node]:
            continue
        latest = min(depths[r] - (labels[r] != labels[node]) for r in readers[node])
        joins = any(labels[r] == labels[node] and depths[r] == latest for r in readers[node])
        if joins and latest > depths[node]:
            depths[node] = latest
    return depths
