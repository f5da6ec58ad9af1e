"""The record of a search: its inputs and its progress, for reports and explanations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.reasons import time_text
from graphaccel.planner.search.solve import Outcome, Problem

Refine = Callable[[Plan], Plan]


@dataclass
class Record:
    """Filled by `search`, even if it is interrupted.

    watch: called with this record after every candidate.
    problem, pins, batch, given, refine: the inputs; given are the pins as the user wrote them.
    outcome: the candidates so far. done: how many are done. bound: seconds that none of the others
      can beat; they are solved by ascending bound. refused: decisions of plans that were built and
      did not run or did not fit.
    corrected: the problem with device memory reduced by the error of the memory estimate; None
      while no plan is proved.
    """

    watch: Callable[[Record], None] | None = None
    problem: Problem | None = None
    pins: Pins = field(default_factory=Pins)
    batch: int = 1
    given: Mapping[str, Any] = field(default_factory=dict)
    refine: Refine | None = None
    outcome: Outcome | None = None
    done: int = 0
    bound: float = 0.0
    corrected: Problem | None = None
    refused: set[Plan] = field(default_factory=set)

    def asked(
        self,
        problem: Problem,
        pins: Pins,
        batch: int,
        given: Mapping[str, Any],
        refine: Refine | None,
    ) -> None:
        """Record the inputs when the search starts."""
        self.problem, self.pins, self.batch = problem, pins, batch
        self.given, self.refine = given, refine

    def started(self, outcome: Outcome, bound: float) -> None:
        """Record that the candidates are enumerated and none is solved yet."""
        self.outcome, self.bound = outcome, bound

    def tick(self, bound: float, done: int) -> None:
        """Record that `done` candidates are done and none of the others can beat `bound`."""
        self.done, self.bound = done, bound
        if self.watch is not None:
            self.watch(self)

    def first(self, fitting: Sequence[Plan]) -> Plan | None:
        """The best of these plans that was not refused once built."""
        return next((p for p in fitting if p.decided(notes=()) not in self.refused), None)

    def incumbent(self) -> Plan | None:
        """The fastest plan that fits so far, its certificate with the gap; None if there is none.

        Its memory is an estimate. Plans that were built and refused do not count.
        """
        if self.outcome is None:
            return None
        fitting = self.outcome.fitting
        if self.refused:  # skipped at first: this is called often, with many plans
            fitting = [plan for plan in fitting if plan.decided(notes=()) not in self.refused]
        best = min(fitting, key=_seconds, default=None)
        if best is None:
            return None
        tally = self.outcome.tally
        if self.done < tally.candidates:
            gap = max(0.0, 1 - self.bound / _seconds(best))
            rest = (
                f"stopped after {self.done}: none of the rest takes less than "
                f"{time_text(self.bound)}, so the gap is at most {gap:.1%}"
            )
        else:
            rest = "stopped before the programs were built: memory is an estimate"
        return replace(best, certificate=tally.certificate(rest))


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds
