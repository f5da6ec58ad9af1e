"""Liveness analysis: the bytes of storages that live while graphs run.

It counts storages, not tensors: views cost nothing. A storage lives from the node that allocates it
to its last use, or as long as something outside holds it. The result for a run depends only on the
graph and on who else holds its inputs: all microbatches of a step give identical results, so each
graph is walked once for each way in which it is called. A walk is sums over columns
(`planner.memory.graph_columns`), which exist also for graphs that are not built yet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from torch import fx

from graphaccel.planner.memory.graph_columns import Rows, Share, even, rows_of

HOST = "host"  # the category of offloaded bytes
_NEVER = 1 << 62
Live: TypeAlias = Mapping[str, int]  # bytes by category


@dataclass(eq=False)
class Storage:
    """Bytes of one category, live as long as it has holders."""

    size: int
    kind: str
    holders: int = 0


@dataclass(frozen=True)
class _Ran:
    """The result of one run of a graph. change: change of the live bytes. top: the peak above the
    bytes before the run, by category, and in which module. given: (holders, kind) of its inputs,
    after the run; outliving: storages that outlive it; results: numbers of the inputs, then of
    `outliving`. last: the last module. pieces: as top, in each piece of the run, with how far into
    the run it is."""

    change: Live
    top: tuple[int, Live, str] | None
    given: tuple[tuple[int, str], ...]
    outliving: tuple[Storage, ...]
    results: tuple[tuple[int, ...], ...]
    last: str | None
    pieces: tuple[tuple[float, Live, str], ...]


@dataclass
class Liveness:
    """The live bytes, and their peak. at_peak: bytes at the peak, by category; where: the peak in
    words. host_peak: the peak of what `host_copy.to_host` put on the host, not part of the total.

    pieces: number of pieces of each run for `seen`, which describes the last run: how far into the
    run, bytes, where. chosen, exchanged, kernels: see `planner.memory.graph_columns.Rows`.
    """

    peak: int = 0
    where: str = "start of the step"
    at_peak: Live = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    total: int = 0
    here: str = "start of the step"
    pieces: int = 0
    chosen: Share = even
    exchanged: bool = False
    kernels: bool = False
    host_peak: int = 0
    seen: list[tuple[float, Live, str]] = field(default_factory=list)
    _rows: dict[fx.GraphModule, Rows] = field(default_factory=dict)
    _ran: dict[object, _Ran] = field(default_factory=dict)

    def take(self, storage: Storage) -> None:
        """Hold a storage; the first holder adds its bytes."""
        if storage.holders == 0:
            self.live[storage.kind] += storage.size
            self.total += storage.size
            if self.total > self.peak:
                self.peak, self.at_peak, self.where = self.total, dict(self.live), self.here
        storage.holders += 1

    def drop(self, storage: Storage) -> None:
        """Drop a reference to a storage; the last holder frees it."""
        storage.holders -= 1
        if storage.holders == 0:
            self.live[storage.kind] -= storage.size
            self.total -= storage.size if storage.kind != HOST else 0

    def hold(self, held: Iterable[Storage]) -> None:
        """Add a reference to storages that are already held."""
        for storage in held:
            storage.holders += 1

    def recount(self, storage: Storage, kind: str) -> None:
        """Move a storage to another category."""
        self.live[storage.kind] -= storage.size
        self.live[kind] += storage.size
        storage.kind = kind

    def run(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[list[Storage]],
        name: str,
        stage: int,
    ) -> list[list[Storage]]:
        """Run a graph; returns the storages of each of its results. inputs: for each placeholder
        the storages that are passed with it, none for what is held throughout; they are freed at
        their last use."""
        given = list(dict.fromkeys(s for held in inputs for s in held))
        number = {storage: i for i, storage in enumerate(given)}
        key = (
            graph,
            tuple(tuple(number[s] for s in held) for held in inputs),
            tuple((s.size, s.kind, s.holders) for s in given),
        )
        if key not in self._ran:
            if graph not in self._rows:
                self._rows[graph] = rows_of(
                    graph, self.chosen, exchanged=self.exchanged, kernels=self.kernels
                )
            handed = [[number[s] for s in held] for held in inputs]
            self._ran[key] = _Walk(self._rows[graph], given, handed).through(self.pieces)
        return self._repeated(self._ran[key], given, name, stage)

    def _repeated(
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
        self.host_peak = max(self.host_peak, self.live[HOST])  # a run either fills or empties it
        for storage, (holders, kind) in zip(given, ran.given, strict=True):
            storage.holders, storage.kind = holders, kind
        known = [*given, *(Storage(s.size, s.kind, s.holders) for s in ran.outliving)]
        return [[known[i] for i in held] for held in ran.results]


class _Walk:
    """One run of a graph, counted from its start.

    A storage that the run allocates is freed after the last use of all its views; so is an input
    that nothing else holds. Sums over the rows then give the live bytes at each.
    """

    def __init__(
        self, rows: Rows, given: Sequence[Storage], inputs: Sequence[Sequence[int]]
    ) -> None:
        """inputs: for each placeholder which of `given` are passed with it."""
        self.rows, self.given = rows, given
        self.entries = dict(zip(rows.inputs.tolist(), inputs, strict=True))
        kept = np.zeros(len(rows), dtype=bool)
        kept[rows.results[rows.results >= 0]] = True
        self.after = np.where(kept, _NEVER, rows.last)  # the row after which nothing reads a row
        self.end = np.full(len(rows.row_of), -1)  # root → the row after which it is freed
        np.maximum.at(self.end, rows.root, self.after[rows.row_of])
        called = np.zeros(len(rows), dtype=bool)
        called[rows.calls] = True
        own = rows.root == np.arange(len(rows.row_of))
        self.storages = np.flatnonzero(
            own & called[rows.row_of]
        )  # tensors that are storages of the run
        self.left = self.storages[self.end[self.storages] == _NEVER].tolist()
        self.results = self._results()
        self.freed = self._freed()

    def through(self, pieces: int) -> _Ran:
        """Walk through the nodes. pieces: see `Liveness`."""
        rows, built = self.rows, self.storages
        level = self._lives_of(built[~rows.offloaded[built]])  # of the run's storages on the device
        self.host = self._lives_of(built[rows.offloaded[built]])
        rest = [(at, storage.size) for at, storage in self.freed if storage.kind != HOST]
        lost = self._lives((), (), *zip(*rest, strict=True)) if rest else np.zeros_like(level)
        top = None
        new = np.zeros(len(rows), dtype=bool)
        new[rows.row_of[built]] = True
        taking = rows.calls[(new | (rows.scratch > 0))[rows.calls]]
        if len(taking):
            most = level + lost + rows.scratch
            at = int(taking[np.argmax(most[taking])])
            live = self._live(at, int(level[at] + rows.scratch[at]))
            top = int(most[at]), live, rows.module(at)
        end = rows.calls[-1] if len(rows.calls) else None
        return _Ran(
            self._change(),
            top,
            self._holders(),
            self._left(),
            self.results,
            None if end is None else rows.module(int(end)),
            self._fullest(level, level + lost, pieces),
        )

    def _lives_of(self, built: np.ndarray) -> np.ndarray:
        """Bytes at each row of storages that the run allocates."""
        dying = built[self.end[built] < _NEVER]
        sizes = self.rows.size
        return self._lives(self.rows.row_of[built], sizes[built], self.end[dying], sizes[dying])

    def _lives(self, born: Any, more: Any, died: Any, less: Any) -> np.ndarray:
        """Bytes at each row of storages that are allocated at some rows and freed after others."""
        change = np.zeros(len(self.rows) + 1, dtype=np.int64)
        np.add.at(change, np.asarray(born, dtype=np.int64), np.asarray(more, dtype=np.int64))
        np.subtract.at(change, np.asarray(died, dtype=np.int64) + 1, np.asarray(less))
        return np.cumsum(change)[:-1]

    def _results(self) -> tuple[tuple[int, ...], ...]:
        """For each result the numbers of the inputs, then of the remaining storages, that it
        holds."""
        rows = self.rows
        number = {tensor: len(self.given) + i for i, tensor in enumerate(self.left)}
        collected: list[tuple[int, ...]] = []
        for row in rows.results.tolist():
            held: list[int] = []
            if row in self.entries:
                held = [*self.entries[row]]
            elif row >= 0:
                first, many = int(rows.first[row]), int(rows.many[row])
                for tensor in rows.root[first : first + many].tolist():
                    source = int(rows.row_of[tensor])
                    if tensor in number:
                        held.append(number[tensor])
                    elif self.entries[source]:
                        held.append(self.entries[source][tensor - int(rows.first[source])])
            collected.append(tuple(held))
        return tuple(collected)

    def _freed(self) -> list[tuple[int, Storage]]:
        """(the row after which it is freed, storage) of the inputs that nothing else holds."""
        ends: dict[int, int] = {}
        for row, held in self.entries.items():
            first, many = int(self.rows.first[row]), int(self.rows.many[row])
            for place, number in enumerate(held):
                end = self.end[first + place] if place < many else self.after[row]
                ends[number] = max(ends.get(number, -1), int(end))
        handed = Counter(number for held in self.entries.values() for number in held)
        return [
            (end, self.given[number])
            for number, end in ends.items()
            if end < _NEVER and self.given[number].holders == handed[number]
        ]

    def _live(self, row: int, temporary: int) -> Live:
        """The live bytes at a row beyond those before the run, by category."""
        live = {"temporary": temporary, HOST: int(self.host[row]) if row < len(self.host) else 0}
        for end, storage in self.freed:
            if end < row:
                live[storage.kind] = live.get(storage.kind, 0) - storage.size
        return live

    def _change(self) -> Live:
        """The live bytes after the run beyond those before it: what is returned is no longer
        temporary."""
        live = dict(self._live(len(self.rows), 0))
        for storage in self._left():
            live[storage.kind] = live.get(storage.kind, 0) + storage.size
        for storage in self._returned():
            if storage.kind == "temporary":
                live["temporary"] -= storage.size
                live["activation"] = live.get("activation", 0) + storage.size
        return live

    def _returned(self) -> list[Storage]:
        """The inputs that are returned."""
        numbers = dict.fromkeys(n for held in self.results for n in held)
        return [self.given[n] for n in numbers if n < len(self.given)]

    def _holders(self) -> tuple[tuple[int, str], ...]:
        """(holders, kind) of the inputs, after the run."""
        handed = Counter(number for held in self.entries.values() for number in held)
        held = Counter(number for own in self.results for number in own)
        returned = {id(s) for s in self._returned()}
        return tuple(
            (
                storage.holders - handed[i] + held[i],
                "activation"
                if storage.kind == "temporary" and id(storage) in returned
                else storage.kind,
            )
            for i, storage in enumerate(self.given)
        )

    def _left(self) -> tuple[Storage, ...]:
        """The storages that the run allocates and returns."""
        held = Counter(number for own in self.results for number in own)
        return tuple(
            Storage(
                int(self.rows.size[tensor]),
                HOST if self.rows.offloaded[tensor] else "activation",
                held[len(self.given) + i],
            )
            for i, tensor in enumerate(self.left)
        )

    def _fullest(
        self, level: np.ndarray, total: np.ndarray, pieces: int
    ) -> tuple[tuple[float, Live, str], ...]:
        """The moment of most live bytes in each piece of the run."""
        calls = self.rows.calls
        if not pieces or not len(calls):
            return ()
        collected = []
        size = max(1, -(-len(calls) // pieces))
        for first in range(0, len(calls), size):
            piece = calls[first : first + size]
            top = int(np.argmax(total[piece]))
            at = int(piece[top])
            live = self._live(at, int(level[at]))
            collected.append(((first + top + 0.5) / len(calls), live, self.rows.module(at)))
        return tuple(collected)


def _place(module: str, name: str, stage: int) -> str:
    module = module or "outside any module"
    return f"stage {stage}, {name}, {module}" if stage >= 0 else name
