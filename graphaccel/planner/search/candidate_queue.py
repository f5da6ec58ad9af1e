"""A priority queue over the meshes of many layouts, the most promising first.

A large problem has a hundred thousand meshes, of which only some dozens are ever solved: each
layout sorts its own, as columns, and only the next of each layout is in the heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from graphaccel.planner.search.candidates import Layout, Shape


@dataclass(frozen=True, eq=False)
class QueueEntry:
    """The meshes of a layout that are still queued (`waiting`: their numbers, the most promising
    first, from `next` on). about: estimated seconds of each; times: the factor by which all were
    found to take longer. put: how many times the layout had been put when this row was."""

    layout: Layout
    meshes: Sequence[Shape]
    about: np.ndarray
    waiting: np.ndarray
    put: int
    next: int = 0
    times: float = 1.0

    @property
    def index(self) -> int:
        """The number of the most promising mesh."""
        return int(self.waiting[self.next])

    @property
    def first(self) -> Shape:
        """The most promising mesh."""
        return self.meshes[self.index]

    @property
    def seconds(self) -> float:
        """Its estimated seconds."""
        return float(self.about[self.index]) * self.times

    @property
    def rest(self) -> QueueEntry:
        """The row without its first mesh."""
        return replace(self, next=self.next + 1)


class CandidateQueue:
    """The rows of all layouts. A popped row leaves the queue, unless it is pushed back."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[object, ...], int, QueueEntry]] = []
        self._put: dict[Layout, int] = {}  # how many times, by layout
        self._serial = count()
        self._later: list[QueueEntry] = []

    def put(
        self, layout: Layout, meshes: Sequence[Shape], about: np.ndarray, order: np.ndarray
    ) -> None:
        """Queue all meshes of a layout whose `about` is a number, replacing its earlier ones.
        order: the tie-break between equal estimates."""
        waiting = np.lexsort((order, about))[: len(about) - int(np.isnan(about).sum())]
        self._put[layout] = self._put.get(layout, 0) + 1
        self.back(QueueEntry(layout, meshes, about, waiting, self._put[layout]))

    def back(self, row: QueueEntry) -> None:
        """Push a row back, unless it is empty."""
        if row.next < len(row.waiting):
            heapq.heappush(self._heap, (row.seconds, row.first.order, next(self._serial), row))

    def later(self, row: QueueEntry) -> None:
        """Defer a row until `return_later`."""
        self._later.append(row)

    def return_later(self) -> bool:
        """Push the deferred rows back; returns whether there were any."""
        rows, self._later = self._later, []
        for row in rows:
            self.back(row)
        return bool(rows)

    def pop(self) -> QueueEntry | None:
        """The row whose first mesh is most promising; None if the queue is empty."""
        while self._heap:
            row = heapq.heappop(self._heap)[-1]
            if row.put == self._put[row.layout]:  # not replaced since
                return row
        return None
