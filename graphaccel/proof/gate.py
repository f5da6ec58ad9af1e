"""What the first training step has to pass: the captured graph is eager's, and the plan's step is
the captured graph's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from graphaccel.planner.plan import Plan
from graphaccel.progress import progress
from graphaccel.proof.comparison import Pair
from graphaccel.proof.first_step import prove_together
from graphaccel.proof.planned import Expected, Given, expect_together
from graphaccel.runtime.mesh import Mesh


class Gate:
    """Opens once a first step was compared. proving: whether the user's own model is running.

    on: whether anything is compared at all. ranks: of the run; every method is a collective.
    """

    def __init__(self, *, on: bool, ranks: int) -> None:
        self.proving, self.closed = False, on
        self._ranks = ranks
        self._expected: Expected | None = None

    def prove(self, pair: Pair) -> None:
        """The captured graph against eager code. Raises CaptureDiffers (GA108)."""
        self.proving = True
        try:
            prove_together(pair, self._ranks)
        finally:
            self.proving = False

    def expect(self, pair: Pair, plan: Plan) -> None:
        """What the step of this batch is to give: before it, while weights are what they will be
        in it."""
        self._expected = expect_together(pair, plan, self._ranks)
        self.closed = self._expected is not None

    def expect_now(self, pair: Callable[[], Pair], plan: Plan, whole: bool) -> None:
        """`expect`, where the first batch comes after the plan was made; whole: whether every
        parameter is still here in full."""
        if self.closed and self._expected is None:
            if whole:
                self.expect(pair(), plan)
            else:
                progress("not proved", "the plan's step: weights are shards since optimize()", 0.0)
                self.closed = False

    def spoilt(self, overflow: Tensor | None) -> None:
        """A first step in fp16 whose gradients overflowed has none to compare."""
        if self.closed and overflow is not None and bool(overflow):
            progress("not proved", "the plan's step: its gradients overflowed in fp16", 0.0)
            self.closed = False

    def check(self, given: Callable[[], Given], mesh: Mesh) -> None:
        """What the first step gave against what it is to give; after that nothing is compared.

        Raises PlanDiffers (GA109), in every step until one is right.
        """
        if self.closed:
            assert self._expected is not None
            self._expected.check(given(), mesh)
            self.closed, self._expected = False, None
