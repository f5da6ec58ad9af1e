"""Bytes that the optimizer's step needs on a device, beside parameters, gradients and state.

What torch's own steps make is as large as what they step: the loop one tensor at a time, foreach
all of them at once (torch.optim, notes on `foreach`: "uses ~ sizeof(params) more peak memory").
The fused step makes nothing, and a step on the host nothing on the device. After it ZeRO 1 and 2
gather parameters in flat buckets of all ranks' parts, the next one while one is unpacked
(`runtime.twins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.planner.plan import Plan

_FLYING = 2


@dataclass(frozen=True)
class Stepping:
    """Bytes that a step makes for each byte of parameters that it steps (together), and of the
    largest of them (largest)."""

    together: float = 0.0
    largest: float = 0.0

    def needed(self, stepped: int, largest: int) -> int:
        """Bytes for so many of parameters, and of the largest one."""
        return int(self.together * stepped + self.largest * largest)


NOTHING = Stepping()


def step_bytes(
    plan: Plan, stepping: Stepping, states: Sequence[int], whole: Sequence[int], fused: bool
) -> int:
    """The most that a rank's step makes at once. states: bytes of what is stepped of each parameter
    here; whole: of those of which the step has a shard and which rest whole. fused: the step is
    ours (`runtime.optimizer_step`)."""
    here = not fused and "optimizer" not in plan.offload
    made = stepping.needed(sum(states), max(states, default=0)) if here else 0
    return max(made, _gathered(whole, plan.bucket_bytes))


def _gathered(sizes: Sequence[int], bucket_bytes: int) -> int:
    """The most bytes of buckets that follow each other."""
    buckets: list[int] = []
    for size in sizes:
        if not buckets or buckets[-1] + size > bucket_bytes:
            buckets.append(0)
        buckets[-1] += size
    return max((sum(buckets[at : at + _FLYING]) for at in range(len(buckets))), default=0)
