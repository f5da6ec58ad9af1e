"""Forwards that convert a module: one that stays, and one whose weights would be others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors


class Converts(nn.Module):
    """A router that is computed in a dtype of its own, as in Switch Transformers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.router, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(self.dtype)
        gates = self.router(x.to(self.dtype)).softmax(-1).to(x.dtype)
        return self.head(gates * x).square().sum()


def _optimized(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Converts(dtype).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphaccel.optimize(model, optimizer, devices=1)[0]


def test_a_module_that_stays_as_it_is() -> None:
    model, x = _optimized(torch.float64), torch.randn(4, 4, dtype=torch.float64)
    torch.manual_seed(0)
    plain = Converts(torch.float64).double()
    losses = [m(x) for m in (model, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_weights_of_another_dtype_are_refused_each_time() -> None:
    """No run of the forward converts the copy that is captured."""
    for _ in range(4):
        with pytest.raises(errors.GradientRuleRefused) as raised:
            _optimized(torch.float32)(torch.randn(4, 4, dtype=torch.float64))
        text = str(raised.value)
        assert "`Linear.to(...)`, which changes the module's dtype or device" in text
        assert "self.router = self.router.to(self.dtype)" in text
