"""Which splits of the batch a step's graph does not allow, and why."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors import ScheduleRefused, SplitRefused
from graphaccel.errors.messages import Location


@dataclass(frozen=True)
class Limit:
    """An op that does not allow a split of the batch, and why. module: the path of the op's module.
    location: the line that calls it. outside: the loss is not part of the step."""

    op: str
    module: str
    reason: str
    location: Location | None = None
    outside: bool = False

    def __str__(self) -> str:
        return (
            f"{self.op} in {self.module or 'the model'}: {self.reason}" if self.op else self.reason
        )

    def refused(self, axis: str) -> SplitRefused:
        """The error for this limit. axis: "microbatch" or "data"."""
        return SplitRefused(
            axis=axis,
            op=self.op,
            module=self.module,
            location=self.location,
            reason=self.reason,
            outside=self.outside,
        )

    def refused_schedule(self, schedule: str) -> ScheduleRefused:
        """The error for a schedule that does not run all forwards before any backward."""
        return ScheduleRefused(
            schedule=schedule,
            op=self.op,
            module=self.module,
            location=self.location,
            reason=self.reason,
        )


@dataclass(frozen=True)
class Limits:
    """The limits of a graph; None where a split is allowed. head: the op because of which several
    microbatches need a schedule that runs all forwards before any backward (`sharding.rules.head`).
    """

    microbatches: Limit | None = None
    data: Limit | None = None
    head: Limit | None = None
