"""A network that amplifies rounding: its float32 step is not refused for what rounding explains."""

from __future__ import annotations

from collections.abc import Mapping
from unittest.mock import patch

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.errors import PlanDiffers
from graphaccel.proof import gate
from graphaccel.proof.planned import Given, Part, parts_of
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess
DEPTH, WIDTH = 60, 8


def deep() -> nn.Sequential:
    """BatchNorm over eight values, again and again."""
    torch.manual_seed(0)
    norms = (
        each
        for _ in range(DEPTH)
        for each in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    )
    return nn.Sequential(*norms, nn.Linear(WIDTH, 1))


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _off(factor: float) -> float:
    """How far the plan's gradient of the first layer is from plain PyTorch's, relative; or raises.
    factor: of the norms of the gradients that the plan's step is said to give."""

    def told(given: Given) -> Mapping[str, Part]:
        parts = parts_of(given)
        scaled = {n: p for n, p in parts.items() if n.startswith("gradient")}
        return parts | {n: (p, s * factor**2, a * factor) for n, (p, s, a) in scaled.items()}

    plain, model = deep(), deep()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, WIDTH, generator=generator), torch.zeros(8, 1)
    squared(plain(x), y).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    graphaccel.optimize(model, optimizer, loss_fn=squared, data=2, zero=0)
    with captures_of("amplified rounding"), patch.object(gate, "parts_of", told):
        model(x, y).backward()
    true, got = plain[0].weight.grad, model[0].weight.grad
    return ((got - true).norm() / true.norm()).item()


def _refused(factor: float) -> str:
    with pytest.raises(PlanDiffers) as caught:
        _off(factor)
    return str(caught.value)


@pytest.mark.release
def test_what_rounding_explains_is_not_refused(pool: Pool) -> None:
    errors = pool.run(2, _off, 1.0)
    assert 1e-4 < max(errors) < 0.3  # far above what two orders of summation leave elsewhere


@pytest.mark.release
def test_what_it_does_not_explain_is(pool: Pool) -> None:
    for text in pool.run(2, _refused, 2.0):
        assert text.startswith("error[GA109]")
        assert "gradient of `0.weight`: off by " in text


def _without_draws() -> str:
    with patch.object(gate, "rounding_together", lambda *_: {}):
        return _refused(1.0)


@pytest.mark.release
def test_the_draws_tell(pool: Pool) -> None:
    assert all("[GA109]" in text for text in pool.run(2, _without_draws))
