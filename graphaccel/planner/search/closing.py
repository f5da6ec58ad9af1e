"""Narrows the gap of a certificate: solves the candidates of a large problem that leave it.

These are the candidates that were not solved and may be faster than the best by more than a target.
The one with the least bound is next. Where the graph of its layout is not built, that is built, or
that of a layout with fewer axes, which tightens the bounds of both. Otherwise it is solved,
together with those that differ only in what a device holds, the leanest first: where that does not
fit, the others do not either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphaccel.planner.search.best_first import BestFirst
from graphaccel.planner.search.candidates import Layout, Shape
from graphaccel.planner.search.memory_floor import seconds_with_memory

_SOLVED = 800  # candidates that are solved at most
_BUILT = 10  # layouts whose graphs are built at most

_Choices = tuple[str | tuple[str, ...], ...]  # of what is recomputed
_Near = tuple[float, tuple[object, ...], Shape, _Choices]
"""(lower bound, order, mesh, recompute choices that are left)"""


def close(first: BestFirst, target: float, gap: float) -> None:
    """Solve the candidates that may take at most `target` seconds, or the share `gap` less than a
    better plan that is found on the way, unless these are too many, and record anew what is
    left."""
    first.work.outcome.tally.pruned -= first.left
    Closing(first, target, gap).run()
    first.leave()


class Closing:
    """The candidates of a search that leave its gap. gap: share of the best plan's seconds that the
    target is below them. near: of each layout, with the layout that its bounds were derived from;
    left: how many graphs may still be built. refused: layouts that no graph can be sharded for."""

    def __init__(self, first: BestFirst, target: float, gap: float) -> None:
        self.first, self.work = first, first.work
        self.target, self.gap, self.limit = target, gap, first.work.limit
        self.near: dict[Layout, tuple[Layout, list[_Near]]] = {}
        self.left = _BUILT
        self.refused: set[Layout] = set()

    def run(self) -> None:
        """Solve or build what has the least bound, as long as it may take less than the target."""
        enough = self.first.solved + _SOLVED
        while (layout := self._least()) is not None:
            if self.work.bounds.built(layout):
                if self.first.solved >= enough:
                    break
                self._solve(self.near[layout][1])
            elif self.left:
                self._build(layout)
            else:
                break

    def _least(self) -> Layout | None:
        """The layout of the candidate with the least bound."""
        if self.work.limit < self.limit:  # a better plan was found
            self.limit = self.work.limit
            self.target = min(self.target, (1 - self.gap) * self.limit)
        least = {}
        for layout in self.first.groups:
            known = self.work.bounds.nearest(layout)
            if layout not in self.near or self.near[layout][0] != known:
                self.near[layout] = known, sorted(self._under(layout))
            near = self.near[layout][1]
            while near and near[-1][0] > self.target:
                near.pop()
            if near:
                least[layout] = near[0]
        return min(least, key=lambda x: least[x], default=None)

    def _build(self, layout: Layout) -> None:
        """Build the graph of a layout or, of its parents that are not built, of the one with the
        fewest axes."""
        bounds = self.work.bounds
        while layout.parent != bounds.nearest(layout) and layout.parent not in self.refused:
            layout = layout.parent
        self.left -= 1
        if not bounds.build(layout):
            self.refused.add(layout)
            if layout in self.first.groups:
                self.first.impossible(layout)

    def _solve(self, near: list[_Near]) -> None:
        """Solve the candidate with the least bound and those that differ only in what a device
        holds, the leanest first."""
        group = [one for one in near if one[2].comparable == near[0][2].comparable]
        near[:] = [one for one in near if one[2].comparable != near[0][2].comparable]
        for _, _, mesh, choices in sorted(group, key=lambda one: fewest_bytes_first(one[2])):
            self._solve_left(mesh, choices)

    def _under(self, layout: Layout) -> Iterator[_Near]:
        """Of a layout's meshes that were not solved with each recompute choice, those that may take
        at most `target` seconds."""
        work, first, target = self.work, self.first, self.target
        crowded = first.crowded_out[layout]
        free = np.delete(np.arange(len(first.groups[layout])), first.taken[layout])
        places = np.array([*free.tolist(), *first.skipped[layout], *crowded], dtype=np.int64)
        bounds, big = (column[places] for column in work.shape_bounds(layout))
        places = places[(bounds <= target) & ~big & work.cuttable(layout)[places]]
        if not len(places):
            return
        of = work.columns[layout].of(places)
        least, whole = (
            seconds_with_memory(work.bounds, of, target, recompute=some) for some in (True, False)
        )
        recomputed = tuple(choice for choice in work.choices if choice != "none")
        hidden = set(crowded)
        for place, bound, without in zip(
            *map(np.ndarray.tolist, (places, least, whole)), strict=True
        ):
            mesh = first.groups[layout][place]
            if place in hidden:
                bound, left = without, ("none",)
            else:
                left = work.choices if without <= target else recomputed
            if bound <= target and left:
                yield bound, mesh.order, mesh, left

    def _solve_left(self, mesh: Shape, choices: _Choices) -> None:
        """Solve a mesh that was not solved with these recompute choices."""
        first, work, layout = self.first, self.work, mesh.layout
        place = work.place(mesh)
        if place in first.skipped[layout]:
            first.skipped[layout].remove(place)
            work.outcome.tally.pruned -= len(work.choices)
        elif place in first.crowded_out[layout]:
            first.crowded_out[layout].remove(place)
            work.outcome.tally.pruned -= 1
        else:
            first.taken[layout].append(place)
        if "none" in work.choices and "none" not in choices:
            first.crowded_out[layout].append(place)
            work.outcome.tally.pruned += 1
            work.missed(mesh)
        for choice in choices:
            if work.known(mesh):
                work.outcome.tally.pruned += 1
            else:
                work.solve(work.bound(mesh), mesh._replace(recompute=choice))
                first.solved += 1


def fewest_bytes_first(mesh: Shape) -> tuple[object, ...]:
    """Sort key of meshes that share what `Shape.keeps_no_less` compares: the leanest first."""
    return (
        mesh.interleave,
        -mesh.microbatches,
        -mesh.zero,
        mesh.reshard_after_forward != "always",
        mesh.accumulation != "shards",
    )
