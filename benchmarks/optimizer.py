"""One process: AdamW's step over the weights of GPT-2 (124 million) under `graphaccel.optimize`,
against `torch.optim.AdamW(fused=True)`.

graphaccel's side is a plain `AdamW(...)`, as a script has it, with the hooks that `optimize` puts
around it. Both sides read the same gradients.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from benchmarks.common import OURS, Settings, Step, run, time_sides
from graphaccel.runtime.optimizer_step import OptimizerStep


def _weights() -> tuple[list[nn.Parameter], list[Tensor]]:
    """Weights of GPT-2, and gradients for them."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    generator = torch.Generator().manual_seed(4)
    shapes = [p.shape for p in model.parameters()]
    params = [nn.Parameter(torch.randn(s, generator=generator) * 0.02) for s in shapes]
    return params, [torch.randn(s, generator=generator) * 1e-3 for s in shapes]


def _side(ours: bool) -> Step:
    params, grads = _weights()
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    if ours:
        optimizer = torch.optim.AdamW(params, lr=1e-4)
        OptimizerStep(optimizer).start()
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step() -> float:
        optimizer.step()
        return params[0][0, :8].double().sum().item()

    return step


def worker(settings: Settings) -> dict:
    """Both sides on the one rank."""
    makers = {OURS: partial(_side, True), "AdamW(fused=True)": partial(_side, False)}
    return time_sides(settings, makers)


if __name__ == "__main__":
    # Two sides that are the same differ by 2 % in 7 rounds.
    run("optimizer", 1, worker, ["--rounds", "25", *sys.argv[1:]])
