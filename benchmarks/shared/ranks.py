"""The place of a plan among all meshes that a search has.

How many meshes a rough guess (`planner.search.heuristic`, too kind to most) says to be faster, and
how many of those fit and are faster indeed when they are solved, both in closed form.
"""

from __future__ import annotations

import math

from graphaccel.errors import GraphAccelError
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import Shape, layouts, meshes_of, recomputes
from graphaccel.planner.search.heuristic import estimate_best
from graphaccel.planner.search.solve import Problem, excess, with_cuts_and_blocks


class Meshes:
    """All meshes of a problem, with what a guess says of each; what was solved is kept."""

    def __init__(self, problem: Problem, decided: Pins, base: Plan, batch: int) -> None:
        """decided: what is pinned of all of them. base: what is decided but for the mesh."""
        self._problem, self._base = problem, base
        self._about: list[tuple[float, Shape]] = []
        self._solved: dict[Shape, float] = {}
        bounds = Bounds(problem, base)
        for layout in layouts(problem, decided, batch):
            if meshes := list(meshes_of(problem, decided, batch, layout)):
                bounds.build(layout)
                of = columns(meshes, batch)
                times = estimate_best(bounds, of, bounds.seconds(of))[0].tolist()
                self._about += zip(times, meshes, strict=True)

    def place(self, theirs: Plan) -> dict[str, int]:
        """How many meshes there are, are guessed to be faster than `theirs`, and are."""
        prediction = self._problem.predicted(theirs, simulated=False).prediction
        assert prediction is not None
        tried = [mesh for seconds, mesh in self._about if seconds < prediction.seconds]
        for mesh in tried:
            if mesh not in self._solved:
                self._solved[mesh] = best_of(self._problem, mesh, self._base)
        faster = sum(self._solved[mesh] < prediction.seconds for mesh in tried)
        return {"meshes": len(self._about), "guessed_faster": len(tried), "faster": faster}


def best_of(problem: Problem, mesh: Shape, base: Plan) -> float:
    """Seconds of a mesh, in closed form, with the least recomputation that fits; infinity if none
    does."""
    for choice in recomputes(problem, Pins()):
        try:
            plan = with_cuts_and_blocks(problem, mesh.on(base), choice, None)
        except GraphAccelError:
            return math.inf
        if excess(plan, problem.cluster) <= 0:
            assert plan.prediction is not None
            return plan.prediction.seconds
    return math.inf
