"""GPT-2 in plain PyTorch (Radford et al., 2019). This file knows nothing of graphaccel.

model = GPT(GPTConfig(vocabulary=4096))
logits, loss = model(tokens, targets)     # int64[b, s] twice -> float[b, s, vocabulary], float[]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults are those of the smallest published GPT-2."""

    vocabulary: int = 50257
    sequence: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")


class Attention(nn.Module):
    """Causal self-attention: float[b, s, width] -> float[b, s, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        split = (batch, sequence, self.heads, width // self.heads)
        query, key, value = (
            part.view(split).transpose(1, 2) for part in self.query_key_value(x).split(width, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """One pre-norm transformer layer: float[b, s, width] -> float[b, s, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Token and position embeddings, `layers` blocks, and a head tied to the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        """Normal(0, 0.02); the two layers that write to the residual stream by 1/sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # biases and norms are set below or keep PyTorch's ones and zeros
            into_residual = name.endswith(("attention.output.weight", "mlp.2.weight"))
            scale = 1 / math.sqrt(2 * self.config.layers) if into_residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of every next token, and their mean cross-entropy in nats where targets are given.

        `idx` and `targets` are int64[b, s] with s <= config.sequence; targets of -100 count not.
        """
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
