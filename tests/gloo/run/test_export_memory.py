"""An export gathers a file's part of the weights at a time: no rank holds the whole model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import graphaccel
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

MIB = 2**20
LAYERS, WIDTH = 24, 1024  # 96 MiB


def _kibibytes(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = re.search(rf"{field}:\s+(\d+)", status)
    assert line is not None
    return int(line[1])


def _grown(folder: str) -> tuple[int, int]:
    """Bytes by which an export raises the process's memory at its highest, and of the model."""
    torch.manual_seed(0)
    model = graphaccel.deferred(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pins = {"data": 2, "zero": 3, "loss_fn": lambda out: out.square().mean()}
    batch = (torch.ones(2, WIDTH),)
    graphaccel.optimize(model, optimizer, devices=2, check="off", example_batch=batch, **pins)
    size = sum(p.numel() * 4 for p in model.parameters())
    graphaccel.export(f"{folder} before", model, max_shard_bytes=8 * MIB)  # imports take memory
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the highest begins anew
    before = _kibibytes("VmRSS")
    graphaccel.export(folder, model, max_shard_bytes=8 * MIB)
    return (_kibibytes("VmHWM") - before) * 1024, size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
def test_less_than_half_of_the_model_is_gathered(pool: Pool, tmp_path: Path) -> None:
    for grown, size in pool.run(2, _grown, str(tmp_path / "weights")):
        assert size == LAYERS * WIDTH * WIDTH * 4
        assert grown < size / 2
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 12
