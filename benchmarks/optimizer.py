"""One process: AdamW's step over the weights of GPT-2 (124 million) under `graphaccel.optimize`,
against `torch.optim.AdamW(fused=True)`.

graphaccel's side is a plain `AdamW(...)`, as a script has it, with the hooks that `optimize` puts
around it. Both sides step the same weights with the same gradients, in turn, each with the moments
that it made itself: both move 28 bytes a weight, and how fast memory is depends on its pages
(`runtime.host_memory.large_pages`).
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import transformers
from torch import nn

from benchmarks.shared.common import OURS, Settings, Step, run, time_sides
from graphaccel.runtime.parameters.optimizer_step import OptimizerStep


def _weights() -> list[nn.Parameter]:
    """Weights of GPT-2, with gradients."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    generator = torch.Generator().manual_seed(4)
    params = []
    for p in model.parameters():
        weight = nn.Parameter(torch.randn(p.shape, generator=generator) * 0.02)
        weight.grad = torch.randn(p.shape, generator=generator) * 1e-3
        params.append(weight)
    return params


def _side(ours: bool, params: list[nn.Parameter]) -> Step:
    """Steps of one side; the first starts from the weights as made."""
    made = [p.detach().clone() for p in params]
    if ours:
        optimizer = torch.optim.AdamW(params, lr=1e-4)
        OptimizerStep(optimizer).start()
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    @torch.no_grad()
    def step() -> float:
        for p, start in zip(params, made, strict=False):
            p.copy_(start)
        made.clear()
        optimizer.step()
        return params[0][0, :8].double().sum().item()

    return step


def worker(settings: Settings) -> dict:
    """Both sides on the one rank."""
    params = _weights()
    makers = {
        OURS: partial(_side, True, params),
        "AdamW(fused=True)": partial(_side, False, params),
    }
    return time_sides(settings, makers)


if __name__ == "__main__":
    # Two sides that are the same differ by 2 % in 25 rounds, by half a percent in 100.
    run("optimizer", 1, worker, ["--rounds", "100", *sys.argv[1:]])
