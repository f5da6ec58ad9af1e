"""Bytes that live while graphs run, storage by storage.

Storages, not tensors, are counted: views cost nothing. A storage lives from the node that makes it
to its last use, or as long as somebody outside holds it. What a run of a graph does depends on the
graph and on who else holds what it is given, and on nothing else: the microbatches of a step do
the same, so each graph is walked once for each way in which it is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import fx

from graphaccel.ir.values import returned, shares, tensors_of
from graphaccel.kernels.host_copy import TO_HOST
from graphaccel.kernels.register import fusion_of, is_backward

_SENDING = {  # what they send is held until what they give is waited for
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}
HOST = "host"  # the category of what lies there
_WAIT = torch.ops._c10d_functional.wait_tensor.default
Live: TypeAlias = Mapping[str, int]  # bytes by category


@dataclass(eq=False)
class Storage:
    """Bytes of one category, as long as it has holders."""

    size: int
    kind: str
    holders: int = 0


@dataclass(frozen=True)
class _Line:
    """A call. tensors: of its value, each its bytes, or (node, which of its tensors) where it
    shares that one's memory; (-1, which) where that is its own. dead: nodes that nothing reads any
    more after it."""

    index: int
    node: fx.Node
    tensors: tuple[int | tuple[int, int], ...]
    scratch: int
    dead: tuple[int, ...]


@dataclass(frozen=True)
class _Lines:
    """A graph, its nodes by number. inputs: with how many tensors each has. unread: inputs that
    nothing reads. results: -1 for what is no node."""

    inputs: tuple[tuple[int, int], ...]
    unread: tuple[int, ...]
    calls: tuple[_Line, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class _Ran:
    """What a run of a graph did. change: of the bytes that live. top: the most that lived more than
    before, at which node. given: (holders, kind) of what it was given, afterwards; made: storages
    that outlive it; results: numbers of the given, then of the made. last: node. pieces: as top,
    in each piece of the run, with how far into the run it is."""

    change: Live
    top: tuple[int, Live, fx.Node] | None
    given: tuple[tuple[int, str], ...]
    made: tuple[Storage, ...]
    results: tuple[tuple[int, ...], ...]
    last: fx.Node | None
    pieces: tuple[tuple[float, Live, fx.Node], ...]


@dataclass
class Liveness:
    """What lives, and the most that ever lived. at_peak: then, by category; where: in words.
    host_peak: the most of what `host_copy.to_host` put on the host, which is no part of the total.

    pieces: into how many pieces each run is taken apart for `seen`, which is of the last one: how
    far into the run, bytes, where.
    """

    peak: int = 0
    where: str = "start of the step"
    at_peak: Live = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    total: int = 0
    here: str = "start of the step"
    pieces: int = 0
    host_peak: int = 0
    seen: list[tuple[float, Live, str]] = field(default_factory=list)
    _lines: dict[fx.GraphModule, _Lines] = field(default_factory=dict)
    _ran: dict[object, _Ran] = field(default_factory=dict)

    def take(self, storage: Storage) -> None:
        """Hold a storage; the first to do so brings its bytes."""
        if storage.holders == 0:
            self.live[storage.kind] += storage.size
            self.total += storage.size
            if self.total > self.peak:
                self.peak, self.at_peak, self.where = self.total, dict(self.live), self.here
        storage.holders += 1

    def drop(self, storage: Storage) -> None:
        """Let go of a storage; the last to do so frees it."""
        storage.holders -= 1
        if storage.holders == 0:
            self.live[storage.kind] -= storage.size
            self.total -= storage.size if storage.kind != HOST else 0

    def hold(self, held: Iterable[Storage]) -> None:
        """Hold what somebody holds already."""
        for storage in held:
            storage.holders += 1

    def recount(self, storage: Storage, kind: str) -> None:
        """Count a storage to another category."""
        self.live[storage.kind] -= storage.size
        self.live[kind] += storage.size
        storage.kind = kind

    def run(
        self, graph: fx.GraphModule, inputs: Sequence[list[Storage]], name: str, stage: int
    ) -> list[list[Storage]]:
        """Run a graph: what each of its results holds. inputs: for each placeholder what is handed
        over with it, nothing for what is held all the time; it dies at its last use."""
        given = list(dict.fromkeys(s for held in inputs for s in held))
        number = {storage: i for i, storage in enumerate(given)}
        key = (
            graph,
            tuple(tuple(number[s] for s in held) for held in inputs),
            tuple((s.size, s.kind, s.holders) for s in given),
        )
        if key not in self._ran:
            if graph not in self._lines:
                self._lines[graph] = _lines(graph)
            again = [Storage(s.size, s.kind, s.holders) for s in given]
            twins = [[again[number[s]] for s in held] for held in inputs]
            self._ran[key] = _Walk(self._lines[graph], self.pieces).through(again, twins)
        return self._again(self._ran[key], given, name, stage)

    def _again(
        self, ran: _Ran, given: Sequence[Storage], name: str, stage: int
    ) -> list[list[Storage]]:
        before = dict(self.live)

        def at(more: Live) -> dict[str, int]:
            return {k: before.get(k, 0) + more.get(k, 0) for k in {**before, **more}}

        if ran.top is not None and self.total + ran.top[0] > self.peak:
            self.peak = self.total + ran.top[0]
            self.at_peak, self.where = at(ran.top[1]), _place(ran.top[2], name, stage)
        if ran.last is not None:
            self.here = _place(ran.last, name, stage)
        self.seen = [(far, at(more), _place(n, name, stage)) for far, more, n in ran.pieces]
        for kind, size in ran.change.items():
            self.live[kind] += size
            self.total += size if kind != HOST else 0
        self.host_peak = max(self.host_peak, self.live[HOST])  # a run either fills it or empties it
        for storage, (holders, kind) in zip(given, ran.given, strict=True):
            storage.holders, storage.kind = holders, kind
        known = [*given, *(Storage(s.size, s.kind, s.holders) for s in ran.made)]
        return [[known[i] for i in held] for held in ran.results]


class _Walk:
    """One run of a graph, counted from where it starts."""

    def __init__(self, lines: _Lines, pieces: int) -> None:
        self.lines, self.pieces = lines, pieces
        self.live: dict[str, int] = defaultdict(int)
        self.total = 0
        self.top: tuple[int, Live, fx.Node] | None = None

    def through(self, given: list[Storage], inputs: list[list[Storage]]) -> _Ran:
        """Walk through the nodes. given: each storage of `inputs` once, with its holders."""
        holds: dict[int, list[Storage]] = {}
        places: dict[int, Sequence[Storage | None]] = {}  # tensor by tensor; None: always held
        for (index, count), held in zip(self.lines.inputs, inputs, strict=True):
            holds[index] = list(held)
            places[index] = held or [None] * count
        made: list[Storage] = []
        seen: list[tuple[Live, fx.Node]] = []
        self._die(self.lines.unread, holds)
        for line in self.lines.calls:
            mine: list[Storage] = []
            here: list[Storage | None] = []
            for tensor in line.tensors:
                storage: Storage | None
                if isinstance(tensor, int):
                    storage = Storage(tensor, HOST if line.node.target is TO_HOST else "temporary")
                    made.append(storage)
                else:
                    storage = (here if tensor[0] < 0 else places[tensor[0]])[tensor[1]]
                here.append(storage)
                if storage is not None:
                    self._take(storage, line.node)
                    mine.append(storage)
            places[line.index], holds[line.index] = here, mine
            if line.scratch:
                scratch = Storage(line.scratch, "temporary")
                self._take(scratch, line.node)
                self._drop(scratch)
            if self.pieces:
                seen.append((dict(self.live), line.node))
            self._die(line.dead, holds)
        results = [holds.get(index, []) for index in self.lines.results]
        for held in results:
            for storage in held:
                storage.holders += 1
        self._die(self.lines.dead, holds)
        for storage in dict.fromkeys(s for held in results for s in held):
            if storage.kind == "temporary":
                self.live["temporary"] -= storage.size
                self.live["activation"] += storage.size
                storage.kind = "activation"
        left = [storage for storage in made if storage.holders]
        number = {storage: i for i, storage in enumerate((*given, *left))}
        return _Ran(
            dict(self.live),
            self.top,
            tuple((s.holders, s.kind) for s in given),
            tuple(left),
            tuple(tuple(number[s] for s in held) for held in results),
            self.lines.calls[-1].node if self.lines.calls else None,
            self._fullest(seen),
        )

    def _take(self, storage: Storage, node: fx.Node) -> None:
        if storage.holders == 0:
            self.live[storage.kind] += storage.size
            self.total += storage.size if storage.kind != HOST else 0
            if self.top is None or self.total > self.top[0]:
                self.top = (self.total, dict(self.live), node)
        storage.holders += 1

    def _drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.live[storage.kind] -= storage.size
            self.total -= storage.size if storage.kind != HOST else 0

    def _die(self, nodes: Iterable[int], holds: dict[int, list[Storage]]) -> None:
        for node in nodes:
            for storage in holds.pop(node, ()):
                self._drop(storage)

    def _fullest(
        self, seen: Sequence[tuple[Live, fx.Node]]
    ) -> tuple[tuple[float, Live, fx.Node], ...]:
        """Of each piece of the run, the moment at which most lives."""
        found = []
        size = max(1, -(-len(seen) // max(1, self.pieces)))
        for first in range(0, len(seen), size):
            piece = seen[first : first + size]
            top = max(range(len(piece)), key=lambda i: sum(piece[i][0].values()))
            found.append(((first + top + 0.5) / len(seen), *piece[top]))
        return tuple(found)


def _lines(graph: fx.GraphModule) -> _Lines:
    nodes = list(graph.graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    dead = _last_uses(nodes, number)
    inputs, unread, calls = [], [], []
    for index, node in enumerate(nodes):
        if node.op == "placeholder":
            inputs.append((index, len(tensors_of(node.meta["val"]))))
            unread += dead[index]
        elif node.op == "call_function":
            sources = [number[n] for n in node.all_input_nodes]
            tensors = tuple(
                tensor.untyped_storage().nbytes()
                if origin is None
                else (origin[0] if origin[0] < 0 else sources[origin[0]], origin[1])
                for tensor, origin in zip(tensors_of(node.meta["val"]), shares(node), strict=True)
            )
            calls.append(_Line(index, node, tensors, _scratch(node), tuple(dead[index])))
    results = [number[n] if isinstance(n, fx.Node) else -1 for n in returned(graph)]
    return _Lines(
        tuple(inputs), tuple(unread), tuple(calls), tuple(results),
        tuple(i for i, node in enumerate(nodes) if node.op == "output" for i in dead[i]),
    )  # fmt: skip


def _last_uses(nodes: Sequence[fx.Node], number: Mapping[fx.Node, int]) -> list[list[int]]:
    """For each node, those whose last use it is (unused ones die where they are made)."""
    last = list(range(len(nodes)))
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[number[source]] = index
            if node.target is _WAIT and source.target in _SENDING:
                for sent in source.all_input_nodes:
                    last[number[sent]] = index
    dead: list[list[int]] = [[] for _ in nodes]
    for node, index in enumerate(last):
        dead[index].append(node)
    return dead


def _scratch(node: fx.Node) -> int:
    """Bytes that a call takes at its peak besides its results."""
    fusion = fusion_of(node.target)
    if fusion is None or fusion.workspace is None or is_backward(node.target):
        return node.meta.get("scratch", 0)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    return int(fusion.workspace(**dict(zip(fusion.inputs, values, strict=True))))


def _place(node: fx.Node, name: str, stage: int) -> str:
    module = node.meta.get("module") or "outside any module"
    return f"stage {stage}, {name}, {module}" if stage >= 0 else name
