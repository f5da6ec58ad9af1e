"""The same draws for eager code and a graph, float64 throughout, and models left as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphaccel.proof.comparison import Setting, pair_of, precision
from graphaccel.proof.first_step import prove
from graphaccel.proof.modes import SameDraws, Widened
from graphaccel.proof.untouched import RandomState, untouched
from tests.proof.models import batch, captured, seeded

aten = torch.ops.aten


class Draws(nn.Module):
    """Every kind of draw that eager code and a captured graph spell differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(5, 8), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.linear(x))
        x = F.alpha_dropout(x, 0.1, training=True) + torch.rand_like(x)
        x = F.rrelu(x, training=True) * torch.randn(8) + torch.bernoulli(torch.full((8,), 0.5))
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return F.dropout1d(self.attention(x, x, x)[0], 0.5).square().mean()


@pytest.fixture(scope="module")
def drawing() -> tuple:
    return captured(seeded(Draws), batch(targets=False))


def test_draws_of_a_graph_are_those_of_eager_code(drawing: tuple) -> None:
    pair = pair_of(seeded(Draws), None, drawing[0], batch(targets=False), drawing[1])
    for wide in (False, True):
        found = pair.compare(Setting(wide=wide))
        assert len(found) == 7
        assert not [one for one in found if one.wrong]


def test_draws_in_another_order_are_matched_by_shape(drawing: tuple) -> None:
    model = seeded(Draws)
    forward = Draws.forward
    model.forward = lambda x: (torch.rand(3), forward(model, x))[1]  # one that no graph needs
    made = prove(pair_of(model, None, drawing[0], batch(targets=False), drawing[1]))
    assert made.text == "loss and 6 gradients equal eager's (exactly), draws matched by shape"


def test_one_draw_has_one_value_in_every_spelling() -> None:
    x, half = torch.ones(50), torch.full((50,), 0.5)
    spelled = (
        lambda: torch.empty(50).bernoulli_(0.5),
        lambda: torch.empty(50).bernoulli_(half),
        lambda: torch.bernoulli(half),
        lambda: aten.bernoulli.p(x, 0.5),
        lambda: aten.native_dropout(x, 0.5, True)[0] / 2,
        lambda: (torch.rand(50) < 0.5).float(),
        lambda: (torch.rand_like(x) < 0.5).float(),
        lambda: (torch.empty(50).uniform_() < 0.5).float(),
        lambda: (torch.empty(50).uniform_(1, 3) < 2).float(),
    )
    values = []
    for spell in spelled:
        torch.manual_seed(1)
        with SameDraws():
            values.append(spell())
    assert 10 < values[0].sum() < 40
    assert all(torch.equal(values[0], value) for value in values)
    normal = (lambda: torch.randn(50), lambda: torch.empty(50).normal_(1, 2).sub(1).div(2))
    drawn = []
    for spell in normal:
        torch.manual_seed(1)
        with SameDraws():
            drawn.append(spell())
    torch.testing.assert_close(*drawn)


def test_checkpoints_recompute_with_the_same_draws() -> None:
    weight = torch.ones(40, requires_grad=True)
    with SameDraws():
        checkpoint(
            lambda w: F.dropout(w, 0.5).square(), weight, use_reentrant=False
        ).sum().backward()
    assert weight.grad is not None
    assert set(weight.grad.tolist()) == {0.0, 8.0}  # 2 w * 2 * 2 where it is kept


def test_widened_code_never_rounds_to_float32() -> None:
    third = torch.full((3,), 1.0, dtype=torch.float64) / 3
    with Widened():
        assert torch.equal(third.float() + torch.zeros(3, dtype=torch.float32), third)
        assert (third.to(torch.bfloat16) * 3).dtype == torch.float64


class Restless(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.count, self.log, self.seen, self.table = 0, [1], {}, torch.zeros(5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.count += 1
        self.log.append(random.random())
        self.seen["x"] = np.random.rand()
        self.table += 1
        self.mean = self.mean + 1
        self.last = x
        with torch.no_grad():
            self.frozen.weight.lerp_(torch.randn(5, 5), 0.5)
            self.frozen.bias.data.add_(1)
        self.norm.train(False)
        self.norm.train(True)
        loss = self.frozen(self.norm(x)).square().mean()
        if fail:
            raise ValueError("in forward")
        return loss


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_a_model_is_left_as_it_was(fail: bool, wide: bool) -> None:
    model = seeded(Restless)
    model.norm.weight.grad = torch.ones(5)
    calls: list[Tensor] = []
    model.norm.weight.register_hook(calls.append)
    state = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    names, random_before = set(vars(model)), RandomState.here()
    try:
        with untouched(model, wide=wide) as guard, guard, precision(Setting(wide=wide)):
            model(torch.randn(4, 5), fail).backward()
    except ValueError:
        assert fail
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is state[name][0]
        assert tensor.dtype == state[name][1].dtype
        assert torch.equal(tensor, state[name][1]), name
    assert (model.count, model.log, model.seen, set(vars(model))) == (0, [1], {}, names)
    assert torch.equal(model.table, torch.zeros(5))
    assert torch.equal(model.norm.weight.grad, torch.ones(5))
    assert not calls
    after = RandomState.here()
    assert torch.equal(after.cpu, random_before.cpu)
    assert after.python == random_before.python
    assert (after.numpy[1] == random_before.numpy[1]).all()
    model.norm.weight.sum().backward()
    assert len(calls) == 1
