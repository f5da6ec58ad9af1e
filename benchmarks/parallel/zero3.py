"""Sharded parameters on 2 processes: graphaccel with zero=3 against FSDP2 (`fully_shard`).

Each block and the rest of the model is a group of FSDP2, as its documentation advises; each takes
the same global batch, of which FSDP2's ranks run their half. The optimizer step is in both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    model = make_model(settings)
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    return data_step(model, optimizer, share_of(settings, WORLD))


def _ours(settings: Settings) -> Step:
    model, batch = make_model(settings), make_batch(settings)
    return our_step(
        model,
        batch,
        data=WORLD,
        zero=3,
        pipeline=1,
        microbatches=1,
        recompute="none",
        precision="fp32",
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    sides = {OURS: partial(_ours, settings), "fully_shard": partial(_theirs, settings)}
    return time_sides(settings, sides)


if __name__ == "__main__":
    run("zero3", WORLD, worker)
