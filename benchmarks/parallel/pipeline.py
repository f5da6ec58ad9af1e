"""A pipeline of 2 stages: graphaccel against torch.distributed.pipelining's 1F1B.

The stages of the latter are split by hand in the middle of the blocks, with the same number of
microbatches. Its runtime can not keep tied weights in step, so the head has a weight of its own on
both sides. The optimizer step is in both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    make_batch,
    make_model,
    make_optimizer,
    our_step,
    run,
    time_sides,
)
from tests.support.gpt import GPT

WORLD = 2


class First(nn.Module):
    """Embeddings and the first half of the blocks: int64 [B, T] -> float32 [B, T, D]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token = model.token
        self.position = model.position
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, input_ids: Tensor) -> Tensor:
        """The activation that crosses the cut."""
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The other half, norm and head: float32 [B, T, D] -> logits [B, T, V]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.norm = model.norm
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _theirs(settings: Settings) -> Step:
    rank = dist.get_rank()
    whole, batch = make_model(settings, tied=False), make_batch(settings)
    part = (First, Last)[rank](whole)
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, settings.microbatches, loss_fn=_loss)
    optimizer = make_optimizer(part)

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        # Every rank of graphaccel knows the loss: so does every rank here.
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(mean, src=WORLD - 1)
        return mean.item()

    return step


def _ours(settings: Settings) -> Step:
    return our_step(
        make_model(settings, tied=False),
        make_batch(settings),
        data=1,
        pipeline=WORLD,
        schedule="1f1b",
        microbatches=settings.microbatches,
        recompute="none",
        precision="fp32",
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    sides = {OURS: partial(_ours, settings), "torch 1F1B": partial(_theirs, settings)}
    return time_sides(settings, sides)


if __name__ == "__main__":
    run("pipeline", WORLD, worker)
