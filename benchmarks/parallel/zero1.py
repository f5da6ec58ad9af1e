"""Sharded optimizer state on 2 processes: graphaccel with zero=1 against torch's own.

Torch's own is ZeroRedundancyOptimizer over DistributedDataParallel, AdamW in both. Each takes the
same global batch, of which DistributedDataParallel's ranks run their half. The optimizer step is in
both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    data_step,
    make_batch,
    make_model,
    our_step,
    run,
    share_of,
    time_sides,
)

WORLD = 2


def _theirs(settings: Settings) -> Step:
    model = DistributedDataParallel(make_model(settings))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-4)
    return data_step(model, optimizer, share_of(settings, WORLD))


def _ours(settings: Settings) -> Step:
    model, batch = make_model(settings), make_batch(settings)
    return our_step(
        model,
        batch,
        data=WORLD,
        zero=1,
        pipeline=1,
        microbatches=1,
        recompute="none",
        precision="fp32",
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    sides = {OURS: partial(_ours, settings), "ZeroRedundancyOptimizer": partial(_theirs, settings)}
    return time_sides(settings, sides)


if __name__ == "__main__":
    run("zero1", WORLD, worker)
