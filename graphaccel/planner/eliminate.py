"""The cheapest assignment of values to variables, when the cost is a sum of small tables.

Variables are eliminated one at a time: the tables that mention one are added up, and its best value
is noted for every combination of its neighbours. That is exact (Dechter, Bucket Elimination, 1999);
its cost is exponential in the width of the graph only, which for a training step is small: its
forward and backward run beside each other like the sides of a ladder. Where a table would grow too
large, one variable is set to its best value by what is known of it, and the result says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LARGEST = 1 << 21  # entries of a table


@dataclass(frozen=True)
class Table:
    """Costs (float64) by the values of some variables, one array dim for each."""

    variables: tuple[int, ...]
    costs: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """values: by variable. cost: of all tables. guessed: variables that were not solved exactly."""

    values: Mapping[int, int]
    cost: float
    guessed: tuple[int, ...]


def cheapest_assignment(counts: Sequence[int], tables: Sequence[Table]) -> Assignment:
    """Values 0 <= v < counts[i] of variables i with the least sum of costs; ties go to low values.

    A cost of infinity forbids. Raises ValueError when everything is forbidden.
    """
    solver = _Solver(counts, tables)
    solver.run()
    values = solver.values()
    cost = sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)
    if not np.isfinite(cost):
        raise ValueError("no assignment is allowed")
    return Assignment(values, cost, tuple(solver.guessed))


class _Solver:
    def __init__(self, counts: Sequence[int], tables: Sequence[Table]) -> None:
        self.counts = counts
        self.tables: dict[int, Table] = dict(enumerate(tables))
        self.next = len(tables)
        self.of: list[set[int]] = [set() for _ in counts]
        self.neighbours: list[set[int]] = [set() for _ in counts]
        for number, table in self.tables.items():
            self._index(number, table)
        self.order: list[tuple[int, tuple[int, ...], np.ndarray]] = []
        self.guessed: list[int] = []
        self.fixed: dict[int, int] = {}

    def _index(self, number: int, table: Table) -> None:
        for v in table.variables:
            self.of[v].add(number)
            self.neighbours[v].update(u for u in table.variables if u != v)

    def run(self) -> None:
        heap = [(self._size(v), v) for v in range(len(self.counts))]
        heapq.heapify(heap)
        left = set(range(len(self.counts)))
        while left:
            size, v = heapq.heappop(heap)
            if v not in left:
                continue
            now = self._size(v)
            if now != size:
                heapq.heappush(heap, (now, v))
                continue
            if now > LARGEST:
                v = max(left, key=lambda u: (len(self.neighbours[u]), -u))
                touched = self._guess(v)
            else:
                touched = self._eliminate(v)
            left.discard(v)
            for u in sorted(touched):
                heapq.heappush(heap, (self._size(u), u))

    def _size(self, v: int) -> int:
        size = self.counts[v]
        for u in self.neighbours[v]:
            size *= self.counts[u]
        return size

    def _taken(self, v: int) -> list[Table]:
        numbers = sorted(self.of[v])
        taken = [self.tables.pop(n) for n in numbers]
        for number, table in zip(numbers, taken, strict=True):
            for u in table.variables:
                self.of[u].discard(number)
        return taken

    def _eliminate(self, v: int) -> set[int]:
        around = tuple(sorted(self.neighbours[v]))
        total = _added(self._taken(v), (*around, v), self.counts)
        best = total.argmin(axis=-1)
        self.order.append((v, around, best))
        self._release(v, around)
        if around:
            made = Table(around, total.min(axis=-1))
            self.tables[self.next] = made
            self._index(self.next, made)
            self.next += 1
        return set(around)

    def _release(self, v: int, around: Sequence[int]) -> None:
        for u in around:
            self.neighbours[u].discard(v)
        self.neighbours[v] = set()

    def _guess(self, v: int) -> set[int]:
        """Set a variable to the value whose tables are cheapest when each is at its best."""
        around = tuple(sorted(self.neighbours[v]))
        taken = self._taken(v)
        bounds = np.zeros(self.counts[v])
        for table in taken:
            axis = table.variables.index(v)
            others = tuple(d for d in range(table.costs.ndim) if d != axis)
            bounds = bounds + table.costs.min(axis=others)
        value = int(bounds.argmin())
        self.fixed[v] = value
        self.guessed.append(v)
        self._release(v, around)
        for u in around:  # neighbours through v alone are neighbours no more
            self.neighbours[u] = set()
        for table in taken:
            axis = table.variables.index(v)
            rest = tuple(u for u in table.variables if u != v)
            if rest:
                self.tables[self.next] = Table(rest, table.costs.take(value, axis=axis))
                for u in rest:
                    self.of[u].add(self.next)
                self.next += 1
        for u in around:
            for number in self.of[u]:
                self.neighbours[u].update(w for w in self.tables[number].variables if w != u)
        return set(around)

    def values(self) -> dict[int, int]:
        values = dict(self.fixed)
        for v, around, best in reversed(self.order):
            values[v] = int(best[tuple(values[u] for u in around)])
        return values


def _added(
    tables: Sequence[Table], variables: tuple[int, ...], counts: Sequence[int]
) -> np.ndarray:
    """The sum of tables over `variables`, by broadcasting."""
    place = {v: i for i, v in enumerate(variables)}
    total = np.zeros([counts[v] for v in variables])
    for table in tables:
        costs, at = table.costs, [place[v] for v in table.variables]
        if sorted(at) != at:
            costs = costs.transpose(sorted(range(len(at)), key=at.__getitem__))
        shape = [1] * len(variables)
        for v in table.variables:
            shape[place[v]] = counts[v]
        total += costs.reshape(shape)
    return total
