"""Temporary bytes of the optimizer's step on a device, beside parameters, gradients and state.

The temporaries of torch's own steps are as large as what they step: one tensor at a time for the
loop, all of them at once for foreach (torch.optim, notes on `foreach`: "uses ~ sizeof(params) more
peak memory"). The fused step has none, and a step on the host has none on the device. After the
step ZeRO 1 and 2 gather parameters in flat buckets of all ranks' shards, the next bucket while one
is unpacked (`runtime.parameters.sharded_optimizer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.planner.plan.plan import Plan

_FLYING = 2


@dataclass(frozen=True)
class OptimizerMemory:
    """Temporary bytes of a step for each byte of parameters: over all parameters together, for each
    one by itself, and for the one before it, which a loop frees late."""

    together: float = 0.0
    each: float = 0.0
    before: float = 0.0

    def needed(self, stepped: int, sizes: Sequence[int]) -> int:
        """The peak for `stepped` bytes of parameters; sizes: of each, in the order of the step."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        one = max((self.each * own + self.before * last for own, last in pairs), default=0.0)
        return int(self.together * stepped + one)


NOTHING = OptimizerMemory()


def step_bytes(
    plan: Plan,
    step_memory: OptimizerMemory,
    stepped: int,
    sizes: Sequence[int],
    whole: Sequence[int],
    fused: bool,
    padded: int = 0,
) -> int:
    """The peak of temporary bytes of a rank's step. stepped: bytes of parameters; sizes: of each,
    or of the largest twice; whole: of the replicated parameters of which this rank steps a shard.
    fused: the step is graphaccel's own (`runtime.parameters.optimizer_step`). padded: of padded
    shards of replicated parameters, which are then copies."""
    on_host = "optimizer" in plan.offload
    built = 0 if fused or on_host else step_memory.needed(stepped, sizes)
    copies = 0 if on_host else padded
    return copies + max(built, _gathered(whole, plan.bucket_bytes))


def _gathered(sizes: Sequence[int], bucket_bytes: int) -> int:
    """The peak bytes of successive buckets."""
    buckets: list[int] = []
    for size in sizes:
        if not buckets or buckets[-1] + size > bucket_bytes:
            buckets.append(0)
        buckets[-1] += size
    return max((sum(buckets[at : at + _FLYING]) for at in range(len(buckets))), default=0)
