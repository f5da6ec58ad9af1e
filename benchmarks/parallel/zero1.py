"""Sharded optimizer state on 2 processes: graphaccel with zero=1 against torch's own.

Torch's own is ZeroRedundancyOptimizer over DistributedDataParallel, AdamW in both. Each takes the
same global batch, of which DistributedDataParallel's ranks run their half. The optimizer step is in
both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.shared.common import Settings, run, time_data_parallel
from tests.support.gpt import GPT

WORLD = 2


def _theirs(model: GPT) -> tuple[nn.Module, Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=1e-4)


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    return time_data_parallel(settings, WORLD, 1, "ZeroRedundancyOptimizer", _theirs)


if __name__ == "__main__":
    run("zero1", WORLD, worker)
