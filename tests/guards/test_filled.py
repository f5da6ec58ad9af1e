"""Values that the first forward puts where later ones read them, and the script others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.compiler import captures


class Lazy(nn.Module):
    """Scales its loss by a number that it makes itself where there is none."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = nn.Linear(4, 4), way
        self.made: Any = defaultdict(lambda: 1.0) if way == "default" else {}

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x.shape[0]  # read behind this line alone
        return self.net(x).square().sum() / self.rows * self.scale()

    def scale(self) -> float:
        """One, unless the script says otherwise."""
        if self.way == "attribute":
            if not hasattr(self, "factor"):
                self.factor = 1.0
            return self.factor
        if self.way == "key" and "factor" not in self.made:
            self.made["factor"] = 1.0
        if self.way == "set default":
            return self.made.setdefault("factor", 1.0)
        return self.made["factor"]


def _losses(way: str, *, ours: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Lazy(way).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ours:
        graphaccel.optimize(model, optimizer, devices=1)
    losses = []
    for step in range(6):
        if step in (2, 4):
            model.factor = model.made["factor"] = 1.0 / step
        loss = model(torch.linspace(-1, 1, 16).double().view(4, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("way", ["attribute", "key", "set default", "default"])
def test_what_the_script_puts_there_is_followed(way: str) -> None:
    assert _losses(way, ours=True) == pytest.approx(_losses(way, ours=False), rel=1e-12)


def test_what_each_forward_writes_anew_asks_for_no_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = Lazy("attribute")
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    model(torch.ones(4, 4)).backward()
    monkeypatch.setattr(captures, "capture", None)
    for rows in (6, 8):
        model.eval()
        with torch.no_grad():
            model(torch.ones(rows, 4))  # leaves its number of rows, and the factor
        model.train()
        model(torch.ones(4, 4)).backward()
