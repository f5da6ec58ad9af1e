"""The profile at one microbatch size: seconds and bytes per position."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import fx

from graphaccel.capture.symbols import BATCH
from graphaccel.ir.analysis_cache import AnalysisCache
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.axis_collectives import KINDS, CollectiveCosts
from graphaccel.planner.profile.block_recompute import Recomputation, saved_with
from graphaccel.planner.profile.chunk_rows import chunk_sizes
from graphaccel.planner.profile.compiled_traffic import compiled_work
from graphaccel.planner.profile.cost import Sizes, chunk_bytes, dims_of, in_chunks, node_work
from graphaccel.planner.profile.efficiency import Work, gap_seconds, seconds_of
from graphaccel.planner.profile.step_columns import StepColumns
from graphaccel.planner.profile.storages import Tensor


class SizedProfile:
    """Seconds and bytes per position for one microbatch size, as arrays over the positions.

    forward, backward: device seconds; weight: those of the backward that compute only gradients of
    parameters; sent_forward, sent_backward: those of collectives among them; host_forward,
    host_backward: seconds in which the process starts the ops, in parallel with the device. casts:
    seconds of casting parameters without launches, part of the forward and as much of the backward;
    held_casts: those of casts that can run once a step, and held_starts: seconds in which the
    process starts them. launches, forward_launches: device seconds of starting ops, all and those
    of the forward. bytes: of each storage. gradients: bytes of parameters' gradients, where they
    are computed. passing_forward, passing_backward: the peak bytes of values that live only within
    a phase, while the position computes. chunks: chunk sizes in rows that a fused op can use
    (`planner.profile.chunk_rows`). exchanges: reduce-scatters run as an all-to-all and a sum, which
    takes memory for the received parts (`runtime.gloo`). analyses: what is computed from it.
    """

    def __init__(
        self,
        columns: StepColumns,
        microbatch: int,
        device: Device,
        collective_costs: CollectiveCosts | None = None,
        chunk: int = 0,
    ) -> None:
        """chunk: rows at a time of ops that work in chunks; 0: the preferred size."""
        step, length = columns.step, len(columns)
        sizes: Mapping = {**step.sizes, **({BATCH: microbatch} if BATCH in step.sizes else {})}
        resolve = Sizes(sizes)
        self._columns = columns
        self.exchanges = device.type == "cpu"
        self.analyses = AnalysisCache()
        self._by_recomputation: WeakKeyDictionary[Recomputation, AnalysisCache] = (
            WeakKeyDictionary()
        )
        kind, first = columns.node_kinds
        parted = [n for n in first if in_chunks(n)]
        self.chunks = chunk_sizes(parted, resolve, device)
        chunk = chunk or next(iter(self.chunks), 0)
        costs = [_work(n, columns, resolve, chunk, device.type) for n in first]
        moves = np.array([n.target in KINDS for n in first])
        sent = np.zeros(len(first))
        if collective_costs is not None:
            sent = np.array([collective_costs.seconds(n, resolve) for n in first])
        calls = np.where(moves, sent > 0, [w.calls for w in costs])
        gap = gap_seconds(device)
        alone = np.where(moves, 0.0, [seconds_of(w, device) + gap * w.calls for w in costs])
        self._by_kind = alone + sent, sent, device.launch_seconds * calls
        sent, calls, seconds = sent[kind], calls[kind], (alone + sent)[kind]
        place, ahead = columns.node_position, columns.node_forward
        self.launches = gap * float(calls.sum())
        self.forward_launches = gap * float(calls[ahead].sum())
        starting = device.launch_seconds * calls

        def summed(values: np.ndarray, here: np.ndarray) -> np.ndarray:
            # bincount of nothing gives integers, to which no seconds can be added
            return np.bincount(place[here], values[here], minlength=length).astype(float)

        self.sent_forward, self.sent_backward = summed(sent, ahead), summed(sent, ~ahead)
        self.forward, self.backward = summed(seconds, ahead), summed(seconds, ~ahead)
        self.host_forward, self.host_backward = summed(starting, ahead), summed(starting, ~ahead)
        released = columns.node_released
        self.casts = summed(seconds - gap * calls, released)
        self.held_casts = summed(seconds - gap * calls, columns.node_held)
        self.held_starts = summed(starting, columns.node_held)
        if released.any():
            self.backward += summed(seconds, released)
            self.host_backward += summed(starting, released)
        taken = [chunk_bytes(n, resolve, chunk) if n in parted else 0 for n in first]
        self._taken = np.array(taken, dtype=np.int64)
        of, tensors = columns.storage_kinds
        self.bytes = np.array([_bytes(t, resolve) for t in tensors], dtype=np.int64)[of]

    @cached_property
    def weight(self) -> np.ndarray:
        """Seconds of the backward that compute only gradients of parameters."""
        columns = self._columns
        place, here = columns.node_position, columns.node_weight
        return np.bincount(place[here], self.row_seconds[here], minlength=len(columns))

    @cached_property
    def work(self) -> float:
        """Seconds of a microbatch, forward and backward."""
        return float(self.forward.sum() + self.backward.sum())

    @cached_property
    def gradients(self) -> np.ndarray:
        """Bytes of parameters' gradients, where they are computed."""
        storages = self._columns.storages
        built = storages.gradient
        return self._at(storages.at[built], self.bytes[built])

    @cached_property
    def batch_bytes(self) -> int:
        """Bytes of the inputs of one microbatch."""
        step, storages = self._columns.step, self._columns.storages
        given = np.array([s.kind in ("batch", "tangent") for s in step.inputs], dtype=bool)
        inputs = np.flatnonzero(storages.input >= 0)
        return int(self.bytes[inputs[given[storages.input[inputs]]]].sum())

    @property
    def passing_forward(self) -> np.ndarray:
        """The peak bytes of values that live only within the forward, per position."""
        return self._passing[0]

    @property
    def passing_backward(self) -> np.ndarray:
        """The peak bytes of values that live only within the backward, per position."""
        return self._passing[1]

    @cached_property
    def passing_held(self) -> tuple[np.ndarray, np.ndarray]:
        """The same peaks of forward and backward, where casts of parameters are held."""
        return self._phases(self._columns.node_held)

    def _phases(self, apart: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        passing, ahead = self._alive(apart), self._columns.node_forward
        return self._most(ahead, passing), self._most(~ahead, passing)

    def passing_added(self, held: bool) -> np.ndarray:
        """`passing_backward` where matmuls accumulate their gradients in buckets. held: casts are
        held."""
        return self.analyses.cached(held, SizedProfile._passing_added, self, held)

    def _passing_added(self, held: bool) -> np.ndarray:
        columns = self._columns
        apart = columns.node_added | columns.node_held if held else columns.node_added
        return self._most(~columns.node_forward, self._alive(apart))

    def _most(self, here: np.ndarray, passing: np.ndarray) -> np.ndarray:
        result = np.zeros(len(self._columns), dtype=np.int64)
        np.maximum.at(result, self._columns.node_position[here], passing[here])
        return result

    def _at(self, places: np.ndarray, sizes: np.ndarray, length: int | None = None) -> np.ndarray:
        """Bytes summed by position. Sums of doubles are exact up to 8 PiB."""
        length = len(self._columns) if length is None else length
        return np.bincount(places, sizes, minlength=length).astype(np.int64)

    @cached_property
    def _passing(self) -> tuple[np.ndarray, np.ndarray]:
        return self._phases(np.zeros(len(self._columns.lines.of), dtype=bool))

    def _alive(self, apart: np.ndarray) -> np.ndarray:
        """Bytes alive at each joint node, with what chunks take, without inputs, what is saved for
        the backward and the results of the nodes `apart`.

        A gradient of a parameter counts only while it is computed; afterwards it is in its
        accumulator.
        """
        storages, rows = self._columns.storages, len(self._columns.lines.of)
        ahead, back = storages.last_forward, storages.last_backward
        last = np.where(storages.common | storages.released | (back < 0), ahead, back)
        last = np.where(storages.gradient | (last < 0), storages.row, last)
        here = storages.value & ~storages.saved & ~apart[storages.row]
        size = self.bytes[here]
        change = self._at(storages.row[here], size, rows + 1)
        change -= self._at(last[here] + 1, size, rows + 1)
        return np.cumsum(change)[:-1] - self._let_go() + self._taken[self._columns.node_kinds[0]]

    def _let_go(self) -> np.ndarray:
        """Bytes of saved values that a position's backward has already read for the last time, at
        each joint node: a loss computed by shards is many nodes at one position."""
        columns, storages = self._columns, self._columns.storages
        places = columns.node_position
        rows = len(places)
        saved = np.flatnonzero(storages.saved)
        last, at = storages.last_backward[saved], storages.first_wanted[saved]
        ends = places[last] == at
        saved, last, at = saved[ends], last[ends], at[ends]
        order = np.argsort(places, kind="stable")  # nodes of a position are contiguous
        start = np.searchsorted(places[order] * rows + order, at * rows + last, side="right")
        end = np.searchsorted(places[order], at, side="right")
        size = self.bytes[saved]
        change = self._at(start, size, rows + 1) - self._at(end, size, rows + 1)
        gone = np.empty(rows, dtype=np.int64)
        gone[order] = np.cumsum(change)[:-1]
        return gone

    def saved(self, recomputation: Recomputation) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per position that are saved for the backward, and that are recomputed for it."""
        return self._analyses_of(recomputation).cached((), SizedProfile._saved, self, recomputation)

    def _saved(self, recomputation: Recomputation) -> tuple[np.ndarray, np.ndarray]:
        kept, kept_at, recomputed, recomputed_at = saved_with(self._columns, recomputation)
        return self._at(kept_at, self.bytes[kept]), self._at(recomputed_at, self.bytes[recomputed])

    def recompute_seconds(
        self, recomputation: Recomputation
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds per position of recomputation for the backward: of the device, those of
        collectives among them, and those in which the process starts the ops."""
        return self._analyses_of(recomputation).cached(
            (), SizedProfile._recompute_seconds, self, recomputation
        )

    def _recompute_seconds(
        self, recomputation: Recomputation
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        here, length = recomputation.rows, len(self._columns)
        place, kind = self._columns.node_position[here], self._columns.node_kinds[0][here]
        seconds, sent, starting = (
            np.bincount(place, values[kind], minlength=length).astype(float)
            for values in self._by_kind
        )
        return seconds, sent, starting

    def _analyses_of(self, recomputation: Recomputation) -> AnalysisCache:
        """The results of a recomputation, for as long as it lives."""
        return self._by_recomputation.setdefault(recomputation, AnalysisCache())

    @property
    def row_seconds(self) -> np.ndarray:
        """Seconds of the device for each joint row."""
        return self._by_kind[0][self._columns.node_kinds[0]]


def _work(node: fx.Node, columns: StepColumns, sizes: Sizes, chunk: int, on: str) -> Work:
    part = columns.traffic.get(node)
    return node_work(node, sizes, chunk, on) if part is None else compiled_work(node, part, sizes)


def _bytes(tensor: Tensor, sizes: Sizes) -> int:
    dims: Any = dims_of(tensor.node, sizes)
    if tensor.item >= 0:
        dims = dims[tensor.item]
    return int(np.prod(dims, dtype=np.int64)) * tensor.value.element_size()
