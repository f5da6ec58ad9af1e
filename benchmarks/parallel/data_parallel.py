"""Data parallelism on 2 processes: graphaccel against DistributedDataParallel.

Each takes the same global batch; DistributedDataParallel's ranks run their half of it. No label is
ignored, so its mean of means is the mean. The optimizer step is in both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    data_step,
    make_batch,
    make_model,
    make_optimizer,
    our_step,
    run,
    share_of,
    time_sides,
)

WORLD = 2


def _theirs(settings: Settings) -> Step:
    model = DistributedDataParallel(make_model(settings))
    optimizer = make_optimizer(model)
    return data_step(model, optimizer, share_of(settings, WORLD))


def _ours(settings: Settings) -> Step:
    model, batch = make_model(settings), make_batch(settings)
    return our_step(
        model,
        batch,
        data=WORLD,
        zero=0,
        pipeline=1,
        microbatches=1,
        recompute="none",
        precision="fp32",
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    sides = {OURS: partial(_ours, settings), "DistributedDataParallel": partial(_theirs, settings)}
    return time_sides(settings, sides)


if __name__ == "__main__":
    run("data_parallel", WORLD, worker)
