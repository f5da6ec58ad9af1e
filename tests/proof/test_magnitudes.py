"""Sums of absolute values beside those of the values, by torch's own ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphaccel.compiler.model import as_batch
from graphaccel.proof.comparison import Pair, Setting, pair_of
from tests.proof.models import batch, captured, seeded

OLD = 0.3


class Kept(nn.Module):
    """A buffer that `update` changes; returns its loss."""

    def __init__(self, update: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.update = nn.Linear(5, 4), update
        self.register_buffer("kept", torch.full((4,), -OLD))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.kept.copy_(self.update(self.kept, hidden.detach()))
        return hidden.square().mean()


def _pair(update: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    given, model = batch(targets=False), seeded(lambda: Kept(update))
    step, sizes = captured(model, given)
    return pair_of(model, None, step, given, sizes)


@pytest.mark.parametrize(
    ("update", "terms"),
    [
        (lambda b, h: b.lerp(h.mean(0), 0.1), lambda h: 0.9 * OLD + 0.1 * h.abs().mean(0)),
        (
            lambda b, h: b * 0.5 - h.sum(0).reshape(2, 2).flatten() / -6,
            lambda h: 0.5 * OLD + h.abs().sum(0) / 6,
        ),
        (lambda b, h: -(h - 1).mean(0), lambda h: (h - 1).abs().mean(0)),
    ],
    ids=["lerp", "sum", "shifted"],
)
def test_terms_of_a_sum(
    update: Callable[[Tensor, Tensor], Tensor], terms: Callable[[Tensor], Tensor]
) -> None:
    pair = _pair(update)
    made, _ = pair.run(Setting())
    hidden = pair.subject.model.get_submodule("linear")(batch(targets=False).leaves[0])
    assert made.magnitudes["kept"] == pytest.approx(terms(hidden).norm().item(), rel=1e-5)


def test_of_a_batch_norm_the_root_of_the_mean_square_bounds_the_terms() -> None:
    given = as_batch((batch(targets=False).leaves[0].double(),))
    model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(5)).double())
    step, sizes = captured(model, given)
    made, _ = pair_of(model, None, step, given, sizes).run(Setting())
    x = given.leaves[0]
    mean, terms = 0.1 * x.mean(0), 0.1 * x.abs().mean(0)
    assert terms.norm() <= made.magnitudes["0.running_mean"]
    assert made.magnitudes["0.running_mean"] <= 2 * terms.norm() + mean.norm()


def test_what_is_no_sum_has_none() -> None:
    made, _ = _pair(lambda b, h: b + h[0].exp()).run(Setting())
    assert not made.magnitudes
