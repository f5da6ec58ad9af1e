"""A plain GPT in one file: the model a reader would write by hand, with tied embeddings.

Shapes: B batch, T tokens, H heads, D hidden width, V vocabulary. It knows nothing of graphaccel.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, norm, and an output layer tied to the embedding.

    `forward(input_ids, labels)` takes int64 [B, T] twice and returns the mean cross entropy of
    predicting `labels[:, t]` from `input_ids[:, :t + 1]` (a scalar) over labels that are not -100;
    without labels it returns logits [B, T, V].
    """

    def __init__(
        self,
        vocabulary: int = 96,
        context: int = 32,
        width: int = 32,
        heads: int = 4,
        layers: int = 4,
        deviation: float = 0.02,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.apply(partial(_initialise, deviation))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token(input_ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def _initialise(deviation: float, module: nn.Module) -> None:
    """GPT-2's initialisation: normal weights, biases 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
