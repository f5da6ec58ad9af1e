"""Small captured steps, for the passes that rewrite a step and not a graph text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture


class Layer(nn.Module):
    """mean((tanh(x @ w.t()) - y)²): float64 [B, 4] and [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.tanh(self.proj(x)), y)


def layer(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch, StepGraph]:
    """The model, a batch of 8 and its captured step."""
    torch.manual_seed(0)
    model = Layer().to(dtype)
    batch = flatten_call((torch.randn(8, 4).to(dtype), torch.randn(8, 3).to(dtype)), {})
    return model, batch, capture(model, batch, symbolic=True)


def inputs_of(model: nn.Module, batch: Batch, step: StepGraph) -> list[Tensor]:
    """The values of the step's placeholders."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return [
        batch.leaves[spec.leaf] if spec.kind == "batch" else state[spec.name].detach()
        for spec in step.inputs
    ]


def eager(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Loss and gradients of eager mode."""
    loss = model(*batch.leaves)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
