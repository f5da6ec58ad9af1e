"""Sharded parameters on 2 processes: graphaccel with zero=3 against FSDP2 (`fully_shard`).

Each block and the rest of the model is a group of FSDP2, as its documentation advises; each takes
the same global batch, of which FSDP2's ranks run their half. The optimizer step is in both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from benchmarks.shared.common import Settings, make_optimizer, run, time_data_parallel
from tests.support.gpt import GPT

WORLD = 2


def _theirs(model: GPT) -> tuple[nn.Module, Optimizer]:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make_optimizer(model)


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    return time_data_parallel(settings, WORLD, 3, "fully_shard", _theirs)


if __name__ == "__main__":
    run("zero3", WORLD, worker)
