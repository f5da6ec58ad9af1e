"""Split layers of your own by hand: per module, per tensor, per stage; or leave it to the planner.

    python examples/own_layers/train.py
    graphaccel run --devices 2 examples/own_layers/train.py                  # the planner
    graphaccel run --devices 4 examples/own_layers/train.py --by-hand

The model is plain PyTorch. By hand, columns and rows of its matrices are placed over the tensor
axis as Megatron-LM does it, the embedding by its words, and each block has its stage.
"""

import argparse

import torch
from torch import Tensor, nn

import graphaccel

parser = argparse.ArgumentParser(description="Train layers of one's own.")
parser.add_argument("--by-hand", action="store_true", help="tensor 2 x pipeline 2, placed here")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()
WORDS, LENGTH, ROWS = 64, 16, 16


class Mixer(nn.Module):
    """Two matrices with a gate between them, and a running mean over the words before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gate = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        y = y + y.cumsum(1) / steps[:, None]
        return x + self.down(self.up(y) * torch.sigmoid(self.gate(y)))


class Words(nn.Module):
    """Predicts the next word; returns its loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Mixer(width) for _ in range(blocks)])
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(scores, words[:, 1:].flatten())


def by_hand(blocks: int) -> dict:
    """Rows of weights are outputs: dim 0 shards what a matrix gives, dim 1 what it takes."""
    columns, rows = graphaccel.shard(0, "tensor"), graphaccel.shard(1, "tensor")
    placements = {"embed.weight": columns, "head": columns}  # a tensor, and a module
    for number in range(blocks):
        placements[f"blocks.{number}.up"] = columns
        placements[f"blocks.{number}.gate"] = columns
        placements[f"blocks.{number}.down.weight"] = rows
        placements[f"blocks.{number}.norm"] = graphaccel.replicate()
    stages = {f"blocks.{number}": number * 2 // blocks for number in range(blocks)}
    return {"tensor": 2, "pipeline": 2, "placements": placements, "stage_of": stages}


torch.manual_seed(0)
model = Words(options.width, options.blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
pins = by_hand(options.blocks) if options.by_hand else {}
model, optimizer = graphaccel.optimize(model, optimizer, **pins)

generator = torch.Generator().manual_seed(0)
for step in range(options.steps):
    starts = torch.randint(WORDS, (ROWS, 1), generator=generator)
    words = (starts + torch.arange(LENGTH) * 3) % WORDS  # each word is 3 behind the one before
    loss = model(words)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == options.steps - 1:
        print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
print(model.graphaccel.report())
