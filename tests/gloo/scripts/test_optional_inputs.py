"""Scripts that give a model other inputs from step to step: equal to plain PyTorch in float64."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, plans_of_two, weights

PLANS = plans_of_two("zero3", "pipeline")


class Net(nn.Module):
    """Inputs [B, 4], a mask [B, 8] and a scale [B], of which it may have neither."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.masked = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        if mask is not None:
            h = h * mask + self.masked(mask)
        h = torch.tanh(self.b(h))
        return self.c(h if scale is None else h * scale[:, None]).square().mean()


def other_inputs(wrap: Wrap) -> Iterator[Tensor]:
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = wrap(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    for step in range(7):
        x, mask, scale = (
            torch.rand(*shape, generator=generator).double() for shape in ((4, 4), (4, 8), (4,))
        )
        calls = (
            lambda x=x, m=mask: model(x, m),
            lambda x=x, m=mask: model(mask=m, x=x),
            lambda x=x: model(x),  # accumulated with the next
            lambda x=x, s=scale: model(x=x, scale=s),
            lambda x=x, m=mask, s=scale: model(x, m, s),
            lambda x=x: model(x, mask=None),
            lambda x=x, m=mask: model(x=x, mask=m),
        )
        loss = calls[step]()
        loss.backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
        yield loss
    yield from weights(model)


@pytest.mark.multiprocess
@pytest.mark.parametrize("plan", PLANS)
def test_other_inputs(pool: Pool, plan: str) -> None:
    assert max(pool.run(2, furthest, other_inputs, PLANS[plan])) < 1e-12


class Stages(nn.Module):
    """Looks up a small table, then a large one; layers are reached through weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Embedding(4, 4), nn.Embedding(16, 4), nn.Linear(4, 1)
        self.stage = 0
        self.__dict__["whole"] = weakref.proxy(self)
        self.__dict__["last"] = weakref.ref(self.head)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.whole.small(tokens) if self.stage == 0 else self.large(tokens)
        last = self.last()
        assert last is not None
        return last(h).square().mean()


def stages(wrap: Wrap) -> Iterator[Tensor]:
    model = Stages().double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for stage, tokens in ((0, [1, 3]), (1, [9, 15]), (0, [0, 2]), (1, [3, 4])):
        model.stage = stage
        loss = model(torch.tensor(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
        with torch.no_grad():
            yield model(torch.tensor(tokens))
    yield from weights(model)


def test_a_table_for_each_stage() -> None:
    assert furthest(stages, {"devices": 1}) < 1e-12


def test_an_index_that_the_table_of_this_step_has_not() -> None:
    model = Stages().double()
    model, _ = graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    model.stage = 1
    model(torch.tensor([9, 15])).backward()
    model.stage = 0
    with pytest.raises(graphaccel.errors.GraphMisuse, match=r"`small\.weight` has rows 0 to 3"):
        model(torch.tensor([9, 15]))
