"""What recomputing a block repeats, and what is then saved or held in memory.

A block is recomputed fully, or except for some of its values, which are saved. Blocks with the same
forward are of one kind: what is computed for one holds for all of them.

Recomputed are the values that the backward reads and the values that they depend on, up to those
that are saved, random or communicated, or left the block (`passes.activations.recompute`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.analysis_cache import AnalysisCache
from graphaccel.ir.replication.layers import split
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.step_columns import StepColumns

_FAR = np.iinfo(np.int64).max


def value_labels(block: str, names: Sequence[tuple[str, str]]) -> list[str]:
    """The labels of a block's values, identical in all identical layers: "attn.out linear", the
    module within the block and the call, numbered where there are several. names: (node of the
    forward graph, its module path), in order."""
    seen: dict[str, int] = defaultdict(int)
    results = []
    for name, module in names:
        label = f"{module[len(block) :].strip('.')} {split(name)[0]}".strip()
        seen[label] += 1
        results.append(label if seen[label] == 1 else f"{label} {seen[label]}")
    return results


def block_values(
    nodes: Iterable[fx.Node], positions: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """Block → label of a value → the node of the forward graph that computes it. nodes: of a joint
    graph. positions: forward-graph node → its position."""
    modules: dict[str, str] = {}
    for node in nodes:
        origin = node.meta.get("origin", "")
        if origin in positions:
            modules[origin] = modules.get(origin) or node.meta.get("module", "")
    members: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for origin, module in sorted(modules.items(), key=lambda pair: positions[pair[0]]):
        members[block_of(module)].append((origin, module))
    return {
        block: dict(zip(value_labels(block, own), (origin for origin, _ in own), strict=True))
        for block, own in members.items()
        if block
    }


@dataclass(frozen=True, eq=False)
class Recomputation:
    """What is recomputed. saved: block number → which of its positions are saved, by their order in
    the block. rows: joint rows that are recomputed. inner: storages that are recomputed where the
    backward of their block reads them. until: the position whose backward reads them last; before:
    the position before whose backward they are recomputed; -1 without one. analyses: what is
    computed from it."""

    saved: Mapping[int, tuple[int, ...]]
    rows: np.ndarray
    inner: np.ndarray
    until: np.ndarray
    before: np.ndarray
    analyses: AnalysisCache = field(default_factory=AnalysisCache, repr=False)


@dataclass(frozen=True, eq=False)
class BlockKind:
    """Blocks with the same forward.

    blocks: their numbers. labels: of their positions. places, rows, makes: [block][...] positions,
    joint rows that compute something, and the storages of their results. at: position of a row, by
    its order. fixed: rows that are never recomputed; sent: rows of all-gathers, which are never
    saved; cast: rows that cast a parameter, which the backward repeats itself. maker: row that
    computes each storage. reads: (row, storage) pairs; storages from `len(maker)` on are computed
    outside the block. outer: those storages, of the first block. back: own storages that the
    backward reads; beyond: that the backward outside of the block reads. lowest, highest: position
    of the block whose backward reads them last and first, by its order. counted: own storages that
    one stage computes and saves; owed: outside storages that are not saved for the backward anyway.
    """

    blocks: tuple[int, ...]
    labels: tuple[str, ...]
    places: np.ndarray
    rows: np.ndarray
    makes: np.ndarray
    at: np.ndarray
    fixed: np.ndarray
    sent: np.ndarray
    cast: np.ndarray
    maker: np.ndarray
    reads: tuple[np.ndarray, np.ndarray]
    outer: np.ndarray
    back: np.ndarray
    beyond: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    counted: np.ndarray
    owed: np.ndarray

    @cached_property
    def sources(self) -> list[list[int]]:
        """Storages that each row reads."""
        results: list[list[int]] = [[] for _ in self.at]
        for reader, storage in zip(*(column.tolist() for column in self.reads), strict=True):
            results[reader].append(storage)
        return results

    @cached_property
    def _ways(self) -> dict[tuple[int, ...], _Way]:
        """Cache by saved positions."""
        return {}

    def way(self, saved: tuple[int, ...]) -> _Way:
        """What is recomputed and held in memory where these positions are saved."""
        if saved not in self._ways:
            self._ways[saved] = _Way(
                self.stays(saved), self.recomputed_rows(saved), *self.lives(saved)
            )
        return self._ways[saved]

    def stays(self, saved: Collection[int]) -> np.ndarray:
        """Rows whose values are not recomputed where some positions are saved."""
        return self.fixed | (np.isin(self.at, list(saved)) & ~self.sent)

    def recomputed_rows(self, saved: Collection[int]) -> np.ndarray:
        """Rows that are recomputed."""
        stays, count = self.stays(saved), len(self.maker)
        done = np.zeros(len(self.at), dtype=bool)
        stack = self.maker[self.back].tolist()
        while stack:
            row = stack.pop()
            if not stays[row] and not done[row]:
                done[row] = True
                stack += [int(self.maker[s]) for s in self.sources[row] if s < count]
        return done

    def lives(self, saved: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """(first, last) of the positions, by their order, during whose backward each recomputed own
        storage is held: the backward goes down from the last. It is recomputed when something that
        depends on it is first read. first > last where it is not held from one position to another.
        Casts that recomputed rows read are included."""
        done, count = self.recomputed_rows(saved), len(self.maker)
        read = self.reads[1][done[self.reads[0]]]
        makers = self.maker[read[read < count]]
        done[makers[self.cast[makers]]] = True
        first, last = self.lowest.copy(), self.highest.copy()
        turn = np.full(len(self.at), -1)
        makes: list[list[int]] = [[] for _ in self.at]
        for storage, row in enumerate(self.maker.tolist()):
            makes[row].append(storage)
        for row in np.flatnonzero(done)[::-1].tolist():  # readers of a value come after it
            turn[row] = max(int(last[s]) for s in makes[row])
            for storage in makes[row]:
                last[storage] = turn[row]
            for source in self.sources[row]:
                if source < count:
                    last[source] = max(last[source], turn[row])
                    first[source] = min(first[source], turn[row])
        passing = ~self.back & (first == last)
        freed = done[self.maker] & (self.counted | self.cast[self.maker]) & ~passing
        return np.where(freed, first, len(self.labels)), np.where(freed, last, -1)

    def waiting(self, saved: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """(own storages, outside storages) that are saved for the backward because of this block,
        if it alone is recomputed."""
        done, count = self.recomputed_rows(saved), len(self.maker)
        reader, storage = self.reads
        wanted = np.zeros(count + len(self.outer), dtype=bool)
        wanted[storage[done[reader]]] = True
        stays = self.stays(saved)[self.maker]
        own = self.counted & np.where(stays, self.back | wanted[:count], self.beyond)
        return own, self.owed & wanted[count:]


class _Way(NamedTuple):
    """The results of `BlockKind.stays`, `recomputed_rows` and `lives` for some saved positions."""

    stays: np.ndarray
    done: np.ndarray
    first: np.ndarray
    last: np.ndarray


def recomputation_of(
    columns: StepColumns, kinds: Sequence[BlockKind], saved: Mapping[int, tuple[int, ...]]
) -> Recomputation:
    """What is recomputed where blocks save these of their positions, and nothing else. kinds: of
    all blocks."""
    rows = np.zeros(len(columns.lines.of), dtype=bool)
    inner = np.zeros(len(columns.storages), dtype=bool)
    until, before = np.full(len(inner), -1), np.full(len(inner), -1)
    for kind in kinds if saved else ():
        places = {block: i for i, block in enumerate(kind.blocks)}
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for block in places.keys() & saved.keys():
            groups[saved[block]].append(places[block])
        for kept, chosen in groups.items():
            way = kind.way(kept)
            whole = columns.recompute_whole and not kept
            rows[kind.rows[chosen][:, ~kind.fixed if whole else way.done]] = True
            inner[kind.makes[chosen][:, ~way.stays[kind.maker]]] = True
            first, last = way.first, way.last
            live, makes, places = first <= last, kind.makes[chosen], kind.places[chosen]
            inner[makes[:, live]] = True
            until[makes[:, live]] = places[:, first[live]]
            ended = live & (last + 1 < len(kind.labels))
            before[makes[:, ended]] = places[:, last[ended] + 1]
    return Recomputation(dict(saved), rows, inner, until, before)


def chosen_positions(
    columns: StepColumns, kinds: Sequence[BlockKind], plan: Plan
) -> dict[int, tuple[int, ...]]:
    """Block number → the positions that `plan` saves of it, by their order in the block. kinds: of
    all blocks. Raises ValueError for a value that a block does not have."""
    saved: dict[int, tuple[int, ...]] = dict.fromkeys(columns.numbers(plan.recompute), ())
    if not plan.selective:
        return saved
    kind_of = {block: kind for kind in kinds for block in kind.blocks}
    for own in plan.selective:
        results: dict[int, tuple[int, ...]] = {}
        for number in columns.numbers(own.blocks):
            kind = kind_of[number]
            if id(kind) not in results:
                results[id(kind)] = tuple(sorted(map(kind.labels.index, own.saved)))
            saved[number] = results[id(kind)]
    return saved


def saved_with(columns: StepColumns, recomputation: Recomputation) -> tuple[np.ndarray, ...]:
    """What is saved for the backward, and what is recomputed for it; computed once.

    (storage numbers, positions) of what is saved, (storage numbers, positions as
    `Recomputation.until`) of what is recomputed. Saved: what the backward and recomputed rows read,
    unless it is recomputed in its block and nothing outside that block reads it.
    """
    return recomputation.analyses.cached((), _saved_with, columns, recomputation)


def _saved_with(columns: StepColumns, recomputation: Recomputation) -> tuple[np.ndarray, ...]:
    storages = columns.storages
    storage, row, place, ahead = storages.uses
    own = columns.block_at[storages.at[storage]]
    counted = storages.waits[storage] & (~ahead | recomputation.rows[row])
    counted &= ~(recomputation.inner[storage] & (columns.block_at[place] == own))
    first = np.full(len(storages), _FAR)
    used, start = storages.used
    if len(used):
        first[used] = np.minimum.reduceat(np.where(counted, place, _FAR), start)
    kept = np.flatnonzero(first < _FAR)
    built = np.flatnonzero(recomputation.inner & (recomputation.until >= 0) & (first == _FAR))
    return kept, first[kept], built, recomputation.until[built]


def find_kinds(columns: StepColumns) -> tuple[BlockKind, ...]:
    """The kinds of a step's blocks, in the order in which they first compute something."""
    finder = _Kinds(columns)
    groups: dict[Any, list[int]] = defaultdict(list)
    for block in range(len(columns.block_names)):
        groups[finder.signature(block)].append(block)
    return tuple(finder.kind(blocks) for blocks in groups.values())


class _Kinds:
    """Properties of all blocks, as columns over all rows and storages."""

    def __init__(self, columns: StepColumns) -> None:
        self.columns = columns
        storages, lines = columns.storages, columns.lines
        count = len(columns.block_names)
        block = np.where(columns.node_forward, columns.block_at[columns.node_position], -1)
        views = columns.node_views
        self.positions = _grouped(columns.block_at, count)
        self.rows = _grouped(np.where(views, -1, block), count)
        self.makes = _grouped(block[storages.row], count)
        storage, row, _, ahead = storages.uses
        inside = np.flatnonzero(ahead & (block[row] >= 0))
        self.uses = [inside[i] for i in _grouped(block[row[inside]], count)]
        self.local = _order(self.rows, len(lines.of))
        self.place = _order(self.positions, len(columns))
        self.number = _order(self.makes, len(storages))
        home = block[storages.row]
        self.back = np.zeros(len(storages), dtype=bool)
        self.back[storage[~ahead]] = True
        elsewhere = columns.block_at[storages.uses[2]] != home[storage]
        self.beyond = np.zeros(len(storages), dtype=bool)
        self.beyond[storage[~ahead & elsewhere]] = True
        place = self.place[storages.uses[2]]
        self.lowest = np.full(len(storages), _FAR)
        self.highest = np.full(len(storages), -1)
        np.minimum.at(self.lowest, storage[~ahead & ~elsewhere], place[~ahead & ~elsewhere])
        np.maximum.at(self.highest, storage[~ahead & ~elsewhere], place[~ahead & ~elsewhere])
        leaving = np.zeros(len(lines.of), dtype=bool)
        leaving[storages.row[storage[ahead & elsewhere]]] = True
        leaving[lines.roots()[0][lines.results]] = True
        kept = np.zeros(len(lines.of), dtype=bool)
        kept[storages.row[storages.kept]] = True
        self.fixed = kept | columns.node_released
        if not columns.recompute_whole:
            self.fixed |= leaving
        self.sent = columns.node_gathers
        self.home = home

    def signature(self, block: int) -> Any:
        """Equal for blocks of the same kind."""
        columns, storages = self.columns, self.columns.storages
        rows, makes, uses = self.rows[block], self.makes[block], self.uses[block]
        kinds, sizes = columns.node_kinds[0], columns.storage_kinds[0]
        outer, source = self._sources(block)
        owed = storages.waits[outer] & ~self.back[outer]
        columns = (
            kinds[rows], self.place[columns.node_position[rows]], self.fixed[rows],
            self.local[storages.row[makes]], sizes[makes], self.back[makes], self.beyond[makes],
            self.lowest[makes], self.highest[makes], storages.waits[makes],
            self.local[storages.uses[1][uses]], source, sizes[outer], owed,
        )  # fmt: skip
        return self._labels(block), *((len(c), c.tobytes()) for c in columns)

    def kind(self, blocks: list[int]) -> BlockKind:
        """The kind of blocks with one signature."""
        columns, storages, first = self.columns, self.columns.storages, blocks[0]
        rows, makes, uses = self.rows[first], self.makes[first], self.uses[first]
        outer, source = self._sources(first)
        return BlockKind(
            tuple(blocks),
            self._labels(first),
            np.stack([self.positions[b] for b in blocks]),
            np.stack([self.rows[b] for b in blocks]),
            np.stack([self.makes[b] for b in blocks]),
            self.place[columns.node_position[rows]],
            self.fixed[rows],
            self.sent[rows],
            columns.node_released[rows],
            self.local[storages.row[makes]],
            (self.local[storages.uses[1][uses]], source),
            outer,
            self.back[makes],
            self.beyond[makes],
            self.lowest[makes],
            self.highest[makes],
            storages.waits[makes],
            storages.waits[outer] & ~self.back[outer],
        )

    def _sources(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(outside storages that a block reads, the number of the storage of each of its reads)."""
        storage = self.columns.storages.uses[0][self.uses[block]]
        own = self.home[storage] == block
        outer, which = np.unique(storage[~own], return_inverse=True)
        result = self.number[storage]
        result[~own] = len(self.makes[block]) + which
        return outer, result

    def _labels(self, block: int) -> tuple[str, ...]:
        columns = self.columns
        places: Iterable[int] = self.positions[block].tolist()
        names = [(columns.names[place], columns.modules[place]) for place in places]
        return tuple(value_labels(columns.block_names[block], names))


def _grouped(block: np.ndarray, count: int) -> list[np.ndarray]:
    """The indices at which each block number occurs, in order."""
    order = np.argsort(block, kind="stable")
    ends = np.searchsorted(block[order], np.arange(count + 1))
    return [order[ends[b] : ends[b + 1]] for b in range(count)]


def _order(groups: Sequence[np.ndarray], length: int) -> np.ndarray:
    """The index of each number within its group; -1 for those in none."""
    result = np.full(length, -1)
    for group in groups:
        result[group] = np.arange(len(group))
    return result
