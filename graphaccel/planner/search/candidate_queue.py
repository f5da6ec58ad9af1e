"""Meshes of many layouts, the most promising first.

A large problem has a hundred thousand meshes, of which some dozens are ever looked at: each layout
has its own in order, as columns, and only the next of each is compared with those of the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from graphaccel.planner.search.candidates import Layout, Shape


@dataclass(frozen=True, eq=False)
class Row:
    """Meshes of a layout of which some wait (their numbers, the most promising first, from `next`
    on). about: seconds of each; times: by how much all were found to take longer. put: how often
    the layout was put before, and now."""

    layout: Layout
    meshes: Sequence[Shape]
    about: np.ndarray
    waiting: np.ndarray
    put: int
    next: int = 0
    times: float = 1.0

    @property
    def index(self) -> int:
        """Which of the meshes promises most."""
        return int(self.waiting[self.next])

    @property
    def first(self) -> Shape:
        """That mesh."""
        return self.meshes[self.index]

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        return float(self.about[self.index]) * self.times

    @property
    def rest(self) -> Row:
        """The row without it."""
        return replace(self, next=self.next + 1)


class Promising:
    """The rows of all layouts. What is popped is gone, unless it is put back."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[object, ...], int, Row]] = []
        self._put: dict[Layout, int] = {}  # how often, each layout
        self._serial = count()
        self._later: list[Row] = []

    def put(
        self, layout: Layout, meshes: Sequence[Shape], about: np.ndarray, order: np.ndarray
    ) -> None:
        """All meshes of a layout whose `about` is a number, in place of those it had. order: their
        places among equals."""
        waiting = np.lexsort((order, about))[: len(about) - int(np.isnan(about).sum())]
        self._put[layout] = self._put.get(layout, 0) + 1
        self.back(Row(layout, meshes, about, waiting, self._put[layout]))

    def back(self, row: Row) -> None:
        """A row waits, if something is left of it."""
        if row.next < len(row.waiting):
            heapq.heappush(self._heap, (row.seconds, row.first.order, next(self._serial), row))

    def later(self, row: Row) -> None:
        """A row waits until `return_later`."""
        self._later.append(row)

    def return_later(self) -> bool:
        """Those wait like any other; whether there are some."""
        rows, self._later = self._later, []
        for row in rows:
            self.back(row)
        return bool(rows)

    def pop(self) -> Row | None:
        """The row whose first mesh promises most; None where none waits."""
        while self._heap:
            row = heapq.heappop(self._heap)[-1]
            if row.put == self._put[row.layout]:  # not put again since
                return row
        return None
