"""An optimized model inside of transforms of torch.func: its own forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import graphaccel


def _norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The norm of the gradient of each example."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, given, (row[None],)), label[None])

    gradients = vmap(grad(loss), (None, 0, 0))(weights, x, y)
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


def test_gradients_of_each_example_between_steps() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model: Any = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    graphaccel.optimize(model, optimizers[1], devices=1)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.arange(5) % 4
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            F.cross_entropy(each(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(_norms(model, x, y), _norms(plain, x, y))
    assert model.graphaccel.plan is not None
