"""Data parallelism on 2 processes: graphaccel against DistributedDataParallel.

Each takes the same global batch; DistributedDataParallel's ranks run their half of it. No label is
ignored, so its mean of means is the mean. The optimizer step is in both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.shared.common import Settings, make_optimizer, run, time_data_parallel
from tests.support.gpt import GPT

WORLD = 2


def _theirs(model: GPT) -> tuple[nn.Module, Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, make_optimizer(wrapped)


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    return time_data_parallel(settings, WORLD, 0, "DistributedDataParallel", _theirs)


if __name__ == "__main__":
    run("data_parallel", WORLD, worker)
