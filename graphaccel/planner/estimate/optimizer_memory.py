"""Bytes that the optimizer's step needs on a device, beside parameters, gradients and state.

What torch's own steps make is as large as what they step: the loop one tensor at a time, foreach
all of them at once (torch.optim, notes on `foreach`: "uses ~ sizeof(params) more peak memory").
The fused step makes nothing, and a step on the host nothing on the device. After it ZeRO 1 and 2
gather parameters in flat buckets of all ranks' parts, the next one while one is unpacked
(`runtime.parameters.sharded_optimizer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.planner.plan.plan import Plan

_FLYING = 2


@dataclass(frozen=True)
class Stepping:
    """Bytes that a step makes for each byte of parameters that it steps: of all together, of each
    one by itself, and of the one before it, which a loop lets go of late."""

    together: float = 0.0
    each: float = 0.0
    before: float = 0.0

    def needed(self, stepped: int, sizes: Sequence[int]) -> int:
        """The most for so many bytes of parameters; sizes: of each, in the order of the step."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        one = max((self.each * own + self.before * last for own, last in pairs), default=0.0)
        return int(self.together * stepped + one)


NOTHING = Stepping()


def step_bytes(
    plan: Plan,
    stepping: Stepping,
    stepped: int,
    sizes: Sequence[int],
    whole: Sequence[int],
    fused: bool,
    padded: int = 0,
) -> int:
    """The most that a rank's step makes at once. stepped: bytes of parameters; sizes: of each, or
    of the largest twice; whole: of those of which the step has a shard and which rest whole. fused:
    the step is ours (`runtime.parameters.optimizer_step`). padded: of shards of parameters that
    rest whole, which are copies then."""
    on_host = "optimizer" in plan.offload
    made = 0 if fused or on_host else stepping.needed(stepped, sizes)
    copies = 0 if on_host else padded
    return copies + max(made, _gathered(whole, plan.bucket_bytes))


def _gathered(sizes: Sequence[int], bucket_bytes: int) -> int:
    """The most bytes of buckets that follow each other."""
    buckets: list[int] = []
    for size in sizes:
        if not buckets or buckets[-1] + size > bucket_bytes:
            buckets.append(0)
        buckets[-1] += size
    return max((sum(buckets[at : at + _FLYING]) for at in range(len(buckets))), default=0)
