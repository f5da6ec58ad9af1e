"""Tensor parallelism on 2 processes: graphaccel with tensor=2 against `parallelize_module`.

Theirs is the layout of PyTorch's tutorial: query, key, value, up and head by columns, out and down
by rows, the loss on sharded logits (`loss_parallel`). The model has query, key and value apart and
lets `view` find the number of heads, because theirs needs that; ours does not. The optimizer step
is in both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    make_batch,
    make_optimizer,
    our_step,
    run,
    time_sides,
)

WORLD = 2


class Block(nn.Module):
    """Pre-norm attention and MLP: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        normed = self.norm_1(x)
        q, k, v = (
            layer(normed).view(batch, tokens, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """A GPT whose `forward(input_ids, labels)` takes int64 [B, T] and returns the mean loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.token = nn.Embedding(settings.vocabulary, width)
        self.position = nn.Embedding(settings.tokens, width)
        self.blocks = nn.ModuleList(Block(width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, settings.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token(input_ids) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _model(settings: Settings) -> Decoder:
    torch.manual_seed(1)
    return Decoder(settings)


def _theirs(settings: Settings) -> Step:
    model, batch = _model(settings), make_batch(settings)
    mesh = init_device_mesh("cpu", (WORLD,))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    layout = {"query": columns, "key": columns, "value": columns, "out": rows}
    for block in model.blocks:
        parallelize_module(block, mesh, {**layout, "up": columns, "down": rows})
    head = ColwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(model, mesh, {"head": head})
    optimizer = make_optimizer(model)

    def step() -> float:
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item()

    return step


def _ours(settings: Settings) -> Step:
    return our_step(
        _model(settings),
        make_batch(settings),
        tensor=WORLD,
        data=1,
        pipeline=1,
        microbatches=1,
        recompute="none",
        precision="fp32",
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    sides = {OURS: partial(_ours, settings), "parallelize_module": partial(_theirs, settings)}
    return time_sides(settings, sides)


if __name__ == "__main__":
    run("tensor", WORLD, worker)
