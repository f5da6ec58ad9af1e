"""Best-first search over the candidates of a large problem, most promising first.

The most promising mesh of each recipe of practice (`planner.search.neighbours`) is solved first.
`planner.search.heuristic` estimates which are most promising. Candidates are solved until no lower
bound is below the best time, no estimate is promising any more, or enough were solved: then the
neighbours of the best, as long as one is better. `Outcome.open` records what none of the rest can
beat; `planner.search.closing` solves those of them that leave the gap. The graphs of layouts are
built on the way, those with a tensor axis only first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.candidate_queue import CandidateQueue, QueueEntry
from graphaccel.planner.search.candidates import Layout, Shape, plain_with, shard_sizes, weighed
from graphaccel.planner.search.heuristic import estimate_best
from graphaccel.planner.search.memory_floor import Open, least_open, seconds_with_memory
from graphaccel.planner.search.neighbours import RECIPES, Recipe, neighbours, shape_of
from graphaccel.planner.search.reasons import seconds
from graphaccel.planner.search.search_state import Pass

_SOLVED = 160  # candidates that are solved at most
_FEW = 32  # and at least, of deep models: of five the best was among the first dozen
_FEW_KNOWN = 16  # the same, where the question is whether anything beats a plan already known
_BLOCKS = 320_000  # divided by the square of the block count: solving and layouts cost by block
_BUILT = 6  # layouts whose graphs are built at most; those with a tensor axis only always are
_MORE = 4  # besides, for recipes and neighbours
_BOUNDED = 4  # layouts whose graphs are built for their bounds alone, ...
_PROVED = 0.9  # ... where these are below so much of the best time, ...
_GAINED = 1.02  # ... and by so much below those of all layouts that are built
_NEAR = 48  # candidates around the best that are solved at most
# Of 460 candidates of Llama-3-405B on 1,024 to 16,384 devices none took less than 0.94 of the
# estimate on its layout's own graph; on the graph of another layout estimates were too short, by 0
# to 37 %.
_LIKELY, _UNMADE = 1.07, 1.05
# Stages of less than a block take a second each to build, and send values from inside blocks: they
# are tried last, and only if none of the others fits.
_INSIDE = 1.07


class BestFirst:
    """The search over the candidates of one pass.

    about: estimated seconds of each layout's shapes; guessed: of its best one. slower: by which
    factor estimates rose when the graph was built, by the axes of the layout. crowded: of each
    layout's shapes, whether they are far from fitting without recomputation. taken: numbers of the
    shapes that were handled. skipped: of those that were not solved; crowded_out: of those not
    solved without recomputation, because of the memory they would hold. built: the number of tensor
    axis sizes, plus the layouts built since. beyond: size of the tensor axis above which no layout
    is built. left: the number of candidates that are not solved."""

    def __init__(self, work: Pass) -> None:
        self.work = work
        self.groups = dict(work.meshes)
        self.queue = CandidateQueue()
        self.guessed: dict[Layout, float] = {}
        self.about: dict[Layout, np.ndarray] = {}
        self.slower: dict[tuple[bool, bool], float] = {}
        self.crowded: dict[Layout, np.ndarray] = {}
        self.taken: dict[Layout, list[int]] = {layout: [] for layout in self.groups}
        self.skipped: dict[Layout, list[int]] = {layout: [] for layout in self.groups}
        self.crowded_out: dict[Layout, list[int]] = {layout: [] for layout in self.groups}
        self.blocks = len(work.problem.profile.block_names)
        self.beyond = math.inf
        self.solved = self.built = self.left = 0

    def run(self) -> Iterator[tuple[int, float]]:
        """Solve the candidates; yields each time how many are done and the seconds that none of the
        others can beat."""
        work = self.work
        self._push_all()
        least = work.least()
        self.built = len({x.tensor for x in self.groups})
        few = _FEW if work.goal == math.inf else _FEW_KNOWN
        enough = min(_SOLVED, max(few, _BLOCKS // max(self.blocks, 1) ** 2))
        if work.goal == math.inf:
            for _ in self._usual():
                yield len(work.choices), least
        enough += self.solved
        while self.solved < enough:
            row = self.queue.pop()
            if row is None:
                if work.limit < math.inf or not self.queue.return_later():
                    break
                self.beyond = math.inf  # nothing smaller fits
            elif row.seconds > _LIKELY * work.limit:
                break
            elif weighed(work.bound(row.first)) > work.limit:
                self.queue.back(row.rest)
            elif not work.bounds.built(row.layout):
                self._make(row)
            else:
                self.queue.back(row.rest)
                if row.index not in self.taken[row.layout]:
                    self._solve(row.first)
                    yield len(work.choices), least
        if work.goal == math.inf:
            for _ in self._around():
                yield len(work.choices), least
        self.leave()

    def _usual(self) -> Iterator[Shape]:
        """Solve the most promising mesh of each recipe; yields them."""
        node = self.work.problem.cluster.links[0].size
        for recipe in RECIPES:
            mesh = self._first(recipe, node)
            if mesh is not None and self._can_build(mesh.layout):
                mesh = self._first(recipe, node, mesh.layout)  # by the estimate on its own graph
                if mesh is not None:
                    self._solve(mesh)
                    yield mesh

    def _first(self, recipe: Recipe, node: int, within: Layout | None = None) -> Shape | None:
        """The mesh of a recipe with the least estimate that was not solved yet."""
        best: tuple[float, Shape] | None = None
        for layout, meshes in self.groups.items():
            if layout.tensor > self.beyond or within not in (None, layout) or not meshes:
                continue
            if not recipe.has_layout(layout, node):
                continue
            for place in np.argsort(self.about[layout], kind="stable").tolist():
                about, mesh = float(self.about[layout][place]), meshes[place]
                if about == math.inf or (best is not None and about >= best[0]):
                    break
                inside = self._inside(mesh.pipeline * mesh.interleave)
                if recipe.has(mesh, node) and not inside and place not in self.taken[layout]:
                    best = about, mesh
                    break
        return None if best is None else best[1]

    def _around(self) -> Iterator[Shape]:
        """Solve neighbours of the best plan so far, the most promising first, until none is better;
        yields them."""
        fitting, solved = self.work.outcome.fitting, self.solved
        best: Plan | None = None
        while fitting and self.solved < solved + _NEAR:
            result = min(fitting, key=seconds)
            if best is not None and seconds(result) >= seconds(best):
                break
            best = result
            for mesh in self._near(best):
                if self._can_build(mesh.layout):
                    self._solve(mesh)
                    yield mesh
                better = seconds(min(fitting, key=seconds)) < seconds(best)
                if better or self.solved >= solved + _NEAR:
                    break

    def _near(self, best: Plan) -> list[Shape]:
        """The neighbours of a plan that were not solved and may be faster, by their estimates."""
        work, result = self.work, []
        sizes = shard_sizes(work.problem.cluster, best.data, best.model_parallel_size)
        parts = tuple(0 if size == best.data else size for size in sizes)
        for mesh in dict.fromkeys(neighbours(shape_of(best), parts)):
            if mesh.layout not in self.groups or mesh.layout.tensor > self.beyond:
                continue
            place = work.places(mesh.layout).get(mesh)
            if place is None or place in self.taken[mesh.layout]:
                continue
            about = float(self.about[mesh.layout][place])
            if about < math.inf and work.bound(mesh) < seconds(best):
                result.append((about, mesh.order, mesh))
        return [mesh for *_, mesh in sorted(result)]

    def _can_build(self, layout: Layout) -> bool:
        """Whether the graph of a layout is built, or can be now."""
        if self.work.bounds.built(layout):
            return True
        if layout not in self.groups or self.built >= _BUILT + _MORE:
            return False
        self.built += 1
        if self.work.bounds.build(layout):
            self._push(layout)
            return True
        self.impossible(layout)
        return False

    def _push_all(self) -> None:
        """Push every layout, estimated on the graphs with a tensor axis only."""
        work, best = self.work, math.inf
        alone = [x for x in self.groups if x == replace(work.base_layout, tensor=x.tensor)]
        for layout in sorted(alone, key=lambda x: x.tensor):
            if not work.bounds.built(layout) and not work.bounds.build(layout):
                self.impossible(layout)
                continue
            self._push(layout)
            best = min(best, self.guessed[layout])
            if self.guessed[layout] > _LIKELY * best:
                self.beyond = layout.tensor  # larger ones send more, of smaller matmuls
                break
        for layout in self.groups:
            if layout not in self.guessed:
                self._push(layout)

    def _push(self, layout: Layout) -> None:
        """Queue all shapes of a layout, ordered by the current estimate."""
        work, meshes = self.work, self.groups[layout]
        before = self.guessed.get(layout, math.inf)
        self.guessed[layout] = math.inf
        if not meshes:
            return
        of, built = work.columns[layout], work.bounds.built(layout)
        self.about[layout], self.crowded[layout] = estimate_best(
            work.bounds, of, work.bounds.seconds(of, even=True)
        )
        about = self.about[layout]
        self.guessed[layout] = float(about.min())
        if built and self.guessed[layout] < math.inf > before > 0:
            self.slower[_axes(layout)] = max(1.0, self.guessed[layout] / before)
        seen = (about <= _LIKELY * work.limit) & (built | (about < math.inf))
        order = weighed(about, plain_with(work.pins, layout, of.zero))
        order = order * np.where(self._inside(of.pipeline * of.interleave), _INSIDE, 1.0)
        self.queue.put(layout, meshes, np.where(seen, order, np.nan), of.order)

    def _inside(self, stages: int | np.ndarray) -> bool | np.ndarray:
        """Whether a stage would be smaller than a block, without a pin that asks for so many
        stages."""
        return (0 < self.blocks < stages) & (self.work.pins.pipeline is None)

    def _make(self, row: QueueEntry) -> None:
        """Build the graph of a row's layout, or defer the row, or drop it."""
        layout = row.layout
        if self.built >= _BUILT or row.seconds > self.work.limit:
            return
        if layout.tensor > self.beyond:
            self.queue.later(row)
            return
        more = self.slower.get(_axes(layout), _UNMADE)  # the factor found for similar layouts
        if more > row.times:
            self.queue.back(replace(row, times=more))
            return
        self.built += 1
        if self.work.bounds.build(layout):
            self._push(layout)
        else:
            self.impossible(layout)

    def impossible(self, layout: Layout) -> None:
        """Drop a layout that no graph can be sharded for."""
        meshes = self.groups.pop(layout)
        self.work.outcome.tally.impossible += len(self.work.choices) * len(meshes)

    def _solve(self, mesh: Shape) -> None:
        """Solve a mesh with each recompute choice."""
        work, bound, place = self.work, self.work.bound(mesh), self.work.place(mesh)
        self.taken[mesh.layout].append(place)
        tally, choices = work.outcome.tally, work.choices
        within = work.limit < math.inf and self._inside(mesh.pipeline * mesh.interleave)
        if work.is_misfit(mesh) or within:
            self.skipped[mesh.layout].append(place)
            tally.pruned += len(choices)
            return
        for choice in choices:
            if mesh in work.settled:
                tally.pruned += 1
            elif choice == "none" and self.crowded[mesh.layout][place] and len(choices) > 1:
                self.crowded_out[mesh.layout].append(place)
                work.outcome.cramped = min(work.outcome.cramped, bound)
                tally.pruned += 1
                work.missed(mesh)
            else:
                work.solve(bound, mesh._replace(recompute=choice))
                self.solved += 1

    def leave(self) -> None:
        """Record in the outcome how many candidates are left unsolved, and their lower bound."""
        work = self.work
        rows = {layout: self._left(layout) for layout in self.groups}
        experts = any(layout.expert > 1 for layout in self.groups)
        for _ in range(0 if experts else _BOUNDED):  # graphs of mixtures take long to build
            least = {x: min((o.low for o in own), default=math.inf) for x, own in rows.items()}
            first = min(least, key=lambda x: least[x], default=work.base_layout)
            known = min((least[x] for x in rows if work.bounds.built(x)), default=math.inf)
            gain = min(known, work.limit) / least[first]
            if gain < _GAINED or least[first] > _PROVED * work.limit:
                break
            if work.bounds.build(first):
                rows[first] = self._left(first)
            else:
                del rows[first]
                self.impossible(first)
        free = (len(self.groups[layout]) - len(self.taken[layout]) for layout in rows)
        self.left = len(work.choices) * sum(free)
        work.outcome.tally.pruned += self.left
        work.outcome.open = None
        every = [one for own in rows.values() for one in own]
        if many := sum(one.choices * len(one.least) for one in every):
            work.outcome.open = many, least_open(work.bounds, every, work.limit)

    def _left(self, layout: Layout) -> list[Open]:
        """The candidates of a layout that were not solved and may be faster."""
        free = np.delete(np.arange(len(self.groups[layout])), self.taken[layout]).tolist()
        left = [(free, len(self.work.choices), True)]
        left += [(self.skipped[layout], 1, True), (self.crowded_out[layout], 1, False)]
        return [self._open(layout, *own) for own in left if own[0]]

    def _open(self, layout: Layout, numbers: list[int], choices: int, recompute: bool) -> Open:
        """Those of some candidates of a layout that may be faster. choices: of recomputation."""
        work, places = self.work, np.array(numbers, dtype=np.int64)
        least, big = (column[places] for column in work.shape_bounds(layout))
        possible = ~big & work.cuttable(layout)[places]
        of = work.columns[layout].of(places[(weighed(least) <= work.limit) & possible])
        least = seconds_with_memory(work.bounds, of, work.limit, recompute=recompute)
        near = weighed(least) <= work.limit
        return Open(of.of(near), least[near], choices, recompute)


def _axes(layout: Layout) -> tuple[bool, bool]:
    """Which axes a layout has besides tensor: layouts with the same axes share the correction of
    estimates."""
    return layout.context > 1, layout.expert > 1
