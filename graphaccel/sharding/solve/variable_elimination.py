"""Variable elimination: the cheapest assignment of variables for a cost that is a sum of tables.

Variables are eliminated one at a time: the tables that contain one are summed, and its best value
is recorded for every combination of its neighbours. That is exact (Dechter, Bucket Elimination,
1999); its cost is exponential in the width of the graph only, which for a training step is small:
its forward and backward run beside each other like the sides of a ladder. Values that many layers
read (the output of an encoder) make it wider: as tables grow, values that cannot be best, whatever
the others are, are dropped (Goldstein, Efficient rotamer elimination, 1994, equation 1). Where a
table would still grow too large, one variable is set to its best value by what is known of it, and
the result says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = 1 << 21  # entries of a table
_LARGE = 1 << 12  # table size at which values are first dropped, then at each _GROWTH of it
_GROWTH = 2


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
    """Values 0 <= v < counts[i] of variables i with the least sum of costs; low values win ties.

    Infinite cost means forbidden. Raises ValueError when everything is forbidden.
    """
    solver = _Solver(counts, tables)
    solver.run()
    values = solver.values()
    cost = sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)
    if not np.isfinite(cost):
        raise ValueError("no assignment is allowed")
    return Assignment(values, cost, tuple(solver.guessed))


class _Solver:
    """counts: number of remaining values of each variable. kept: those values. more: cached bounds
    of the remaining tables, by variable (`_least_more`). settled: variables of which no value can
    be dropped while their tables do not change."""

    def __init__(self, counts: Sequence[int], tables: Sequence[Table]) -> None:
        self.counts = list(counts)
        self.kept = [np.arange(count) for count in counts]
        self.tables: dict[int, Table] = dict(enumerate(tables))
        self.next = len(tables)
        self.more: dict[int, dict[int, np.ndarray]] = {}
        self.settled: set[int] = set()
        self.of: list[set[int]] = [set() for _ in counts]
        self.neighbours: list[set[int]] = [set() for _ in counts]
        for number, table in self.tables.items():
            self._index(number, table)
        self.order: list[tuple[int, np.ndarray, dict[int, np.ndarray], np.ndarray]] = []
        self.guessed: list[int] = []
        self.fixed: dict[int, int] = {}

    def _index(self, number: int, table: Table) -> None:
        self.settled.difference_update(table.variables)
        for v in table.variables:
            self.of[v].add(number)
            self.neighbours[v].update(u for u in table.variables if u != v)

    def run(self) -> None:
        left = set(range(len(self.counts)))
        heap = self._heap(left)
        limit = min(_LARGE, LARGEST)
        while left:
            size, v = heapq.heappop(heap)
            if v not in left:
                continue
            now = self._size(v)
            if now != size:
                heapq.heappush(heap, (now, v))
                continue
            if now > limit:
                with np.errstate(invalid="ignore"):  # inf - inf, where both are forbidden
                    dropped = self._drop(left)
                if limit < LARGEST or dropped:
                    heap = self._heap(left)
                    least = heap[0][0] if heap else 0
                    limit = min(max(limit * _GROWTH, least), LARGEST)
                    continue
                heapq.heappush(heap, (now, v))
                v = max(left, key=lambda u: (len(self.neighbours[u]), -u))
                touched = self._fix_cheapest(v)
            else:
                touched = self._remove_variable(v)
            left.discard(v)
            for u in sorted(touched):
                heapq.heappush(heap, (self._size(u), u))

    def _heap(self, left: Collection[int]) -> list[tuple[int, int]]:
        heap = [(self._size(v), v) for v in left]
        heapq.heapify(heap)
        return heap

    def _drop(self, left: set[int]) -> bool:
        """Drop values that another value of the variable beats whatever the others are; a variable
        with one value left is fixed."""
        waiting = dict.fromkeys(sorted(left))
        result = False
        while waiting:
            v = next(iter(waiting))
            del waiting[v]
            if self.counts[v] == 1:
                left.discard(v)
                self._fix(v, 0)
                continue
            if v in self.settled:
                continue
            beaten = self._beaten(v)
            if any(beaten):
                result = True
                self._keep(v, np.flatnonzero(np.logical_not(beaten)))
                waiting |= dict.fromkeys((v, *sorted(self.neighbours[v])))
            else:
                self.settled.add(v)
        return result

    def _beaten(self, v: int) -> list[bool]:
        """Which values of v are beaten by another one whatever the other variables are."""
        more = np.zeros((self.counts[v], self.counts[v]))
        for number in sorted(self.of[v]):
            more += self._least_more(number, v)
        beaten: Any = (more > 0).any(axis=1).tolist()
        beaten[0] = beaten[0] and not all(beaten)  # all are forbidden
        return beaten

    def _least_more(self, number: int, v: int) -> np.ndarray:
        """[count, count]: a lower bound of how much more value i of v costs than value j in a
        table."""
        known = self.more.setdefault(number, {})
        if v not in known:
            table = self.tables[number]
            costs = table.costs.swapaxes(0, table.variables.index(v))
            costs = costs.reshape(len(costs), -1)
            more = costs[:, None] - costs[None, :]
            allowed = np.isfinite(costs)
            if not allowed.all():
                more = np.where(allowed[:, None], more, np.inf)
            known[v] = np.minimum.reduce(more, axis=2)
        return known[v]

    def _keep(self, v: int, which: np.ndarray) -> None:
        self.kept[v], self.counts[v] = self.kept[v][which], len(which)
        for number in self.of[v]:
            table = self.tables[number]
            costs = table.costs.take(which, axis=table.variables.index(v))
            self.tables[number] = Table(table.variables, costs)
            self.more.pop(number, None)
            self.settled.difference_update(table.variables)

    def _size(self, v: int) -> int:
        size = self.counts[v]
        for u in self.neighbours[v]:
            size *= self.counts[u]
        return size

    def _taken(self, v: int) -> list[Table]:
        numbers = sorted(self.of[v])
        taken = [self.tables.pop(n) for n in numbers]
        for number, table in zip(numbers, taken, strict=True):
            self.more.pop(number, None)
            self.settled.difference_update(table.variables)
            for u in table.variables:
                self.of[u].discard(number)
        return taken

    def _remove_variable(self, v: int) -> set[int]:
        around = tuple(sorted(self.neighbours[v]))
        total = _added(self._taken(v), (*around, v), self.counts)
        best = total.argmin(axis=-1)
        self.order.append((v, self.kept[v], {u: self.kept[u] for u in around}, best))
        self._release(v, around)
        if around:
            built = Table(around, np.minimum.reduce(total, axis=-1))
            self.tables[self.next] = built
            self._index(self.next, built)
            self.next += 1
        return set(around)

    def _release(self, v: int, around: Sequence[int]) -> None:
        for u in around:
            self.neighbours[u].discard(v)
        self.neighbours[v] = set()

    def _fix_cheapest(self, v: int) -> set[int]:
        """Fix a variable at the value with the smallest sum of the minima of its tables."""
        bounds = np.zeros(self.counts[v])
        for number in sorted(self.of[v]):
            table = self.tables[number]
            axis = table.variables.index(v)
            others = tuple(d for d in range(table.costs.ndim) if d != axis)
            bounds = bounds + table.costs.min(axis=others)
        self.guessed.append(v)
        return self._fix(v, int(bounds.argmin()))

    def _fix(self, v: int, value: int) -> set[int]:
        """Fix a variable at one of its remaining values."""
        around = tuple(sorted(self.neighbours[v]))
        self.fixed[v] = int(self.kept[v][value])
        taken = self._taken(v)
        self._release(v, around)
        for u in around:  # drop edges that existed through v alone
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
        for v, own, around, best in reversed(self.order):
            at = tuple(int(kept.searchsorted(values[u])) for u, kept in around.items())
            values[v] = int(own[best[at]])
        return values


def _added(
    tables: Sequence[Table], variables: tuple[int, ...], counts: Sequence[int]
) -> np.ndarray:
    """The sum of tables over `variables`, by broadcasting."""
    total = np.zeros([counts[v] for v in variables])
    for table in tables:
        costs, own = table.costs, table.variables
        if own != variables:
            at = [variables.index(v) for v in own]
            if at != (order := sorted(at)):
                costs = costs.transpose([at.index(place) for place in order])
            if len(own) < len(variables):
                costs = costs.reshape([counts[v] if v in own else 1 for v in variables])
        total += costs
    return total
