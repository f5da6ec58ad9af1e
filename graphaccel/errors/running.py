"""Errors at run time (5xx)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphaccel.errors.base import GraphAccelError
from graphaccel.errors.messages import Message, columns, format_bytes


@dataclass(kw_only=True, eq=False, repr=False)
class RankLost(GraphAccelError):
    """A peer rank stopped answering. lost: in words, e.g. "rank 2 (stage 1)". module: whose op
    waited, where it is known."""

    code = "GA501"
    rank: int
    stage: int | None
    lost: str
    last_action: str
    waiting_for: str
    cause: str
    module: str = ""

    def message(self) -> Message:
        me = f"rank {self.rank}" + ("" if self.stage is None else f" (stage {self.stage})")
        return Message(
            f"{me} lost {self.lost}",
            details=columns(
                (
                    ("last action done:", self.last_action),
                    ("waiting for:", self.waiting_for),
                    *((("in module:", self.module),) if self.module else ()),
                    ("reported:", self.cause),
                )
            ),
            why="a process died, or did not answer within the timeout",
            help=(
                "the first error in the log of the lost rank is the cause; read that one first",
                "or, if it has none, its script ended, or went on: save, load and export, and read "
                "parameters and gradients, on every rank, not below `if rank == 0`",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NonFiniteLoss(GraphAccelError):
    """A loss that is NaN or infinite, with on_nonfinite="error". step: from 1; loss: in words."""

    code = "GA416"
    step: int
    loss: str

    def message(self) -> Message:
        return Message(
            f"the loss of training step {self.step} is {self.loss}",
            why="an update by its gradients would make weights NaN; nothing was updated",
            help=(
                "go on without such steps:  "
                "graphaccel.optimize(model, optimizer, on_nonfinite='skip')",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DeviceOutOfMemory(GraphAccelError):
    """A device ran out of memory. predicted, actual: bytes per category, as far as known; owner: of
    the largest. recompute: whether the plan does not recompute all already. pins: of a plan that is
    predicted to fit. smaller: its bytes in tensors, and those of the plan that ran."""

    code = "GA502"
    stage: int
    action: str
    predicted: dict[str, int]
    actual: dict[str, int]
    owner: str = ""
    recompute: bool = True
    pins: dict[str, Any] = field(default_factory=dict)
    smaller: tuple[int, int] | None = None

    def message(self) -> Message:
        def cell(parts: dict[str, int], name: str) -> str:
            return format_bytes(parts[name]) if name in parts else "-"

        names = list(dict.fromkeys((*self.predicted, *self.actual)))
        rows = [(name, cell(self.predicted, name), cell(self.actual, name)) for name in names]
        return Message(
            f"stage {self.stage} ran out of memory during {self.action}",
            details=(
                *columns((("", "predicted", "actual"), *rows)),
                *((f"largest live tensors belong to: {self.owner}",) if self.owner else ()),
            ),
            help=(
                self._pinned(),
                "or plan for less than the device has:  "
                "graphaccel plan FILE --devices N --memory SIZE --json plan.json",
            ),
        )

    def _pinned(self) -> str:
        """What to pin: what is predicted to fit, or what saves most."""
        if self.smaller is not None:
            needed, instead = map(format_bytes, self.smaller)
            pins = ", ".join(f"{name}={value!r}" for name, value in self.pins.items())
            return (
                f"predicted to need {needed} in tensors on its fullest rank, this plan {instead}:  "
                f"graphaccel.optimize(model, optimizer, {pins})"
            )
        if self.recompute:
            return "pin what saves most:  graphaccel.optimize(model, optimizer, recompute='all')"
        return (
            "hold fewer examples at a time:  graphaccel.optimize(model, optimizer, microbatches=N)"
        )
