"""What a step's graph does not allow of splits of the batch, and why."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors import ScheduleRefused, SplitRefused
from graphaccel.errors.messages import Location


@dataclass(frozen=True)
class Limit:
    """An op that does not allow a split of the batch, and why. module: its path. location: of the
    line that calls it. outside: the loss is not part of the step."""

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
        """The error. axis: "microbatch" or "data"."""
        return SplitRefused(
            axis=axis,
            op=self.op,
            module=self.module,
            location=self.location,
            reason=self.reason,
            outside=self.outside,
        )

    def refused_schedule(self, schedule: str) -> ScheduleRefused:
        """The error of a schedule that does not run all forwards before any backward."""
        return ScheduleRefused(
            schedule=schedule,
            op=self.op,
            module=self.module,
            location=self.location,
            reason=self.reason,
        )


@dataclass(frozen=True)
class Limits:
    """What the graph does not allow; None where it does. head: the op for which several
    microbatches need a schedule that runs all forwards before any backward
    (`sharding.rules.head`)."""

    microbatches: Limit | None = None
    data: Limit | None = None
    head: Limit | None = None
