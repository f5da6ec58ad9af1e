"""Ranks that drift apart in the fifth step get the same error in that step, all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import graphaccel
from graphaccel.errors import BatchesDiffer, GraphAccelError, RankLost
from tests.support.captures import captures_of
from tests.support.pool import Pool, WorkerError
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PIPELINE = {"pipeline": 2, "microbatches": 2}
PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "pipeline": PIPELINE,
    "zero 3": {"data": 2, "zero": 3},
}
STEPS = 4


class _Training:
    """A model of this rank that has trained for some steps, and what a script would do next."""

    def __init__(self, pins: dict[str, Any], loss_fn: Any = None) -> None:
        torch.manual_seed(0)
        self.model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        graphaccel.optimize(
            self.model, self.optimizer, devices=2, timeout=60.0, loss_fn=loss_fn, **pins
        )
        for seed in range(STEPS):
            self.step(small_batch(seed=seed))

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.model(*batch).backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(*small_batch())


def _goes_on(training: _Training) -> None:
    training.step(small_batch())


def _values(training: _Training) -> None:
    x, y = small_batch()
    x[0, 0] += 1e-6
    training.step((x, y))


def _shapes(training: _Training) -> None:
    training.step(small_batch(4))


def _skipped(training: _Training) -> None:
    training.step(small_batch(seed=STEPS + 1))


def _evaluates(training: _Training) -> None:
    training.evaluate()


def _saves(training: _Training) -> None:
    graphaccel.full_state_dict(training.model)


def _first_checkpoint(training: _Training) -> None:
    graphaccel.save("never written", training.model, training.optimizer, step=1)


def _first_checkpoint_every(training: _Training) -> None:
    graphaccel.save("never written", training.model, training.optimizer, step=1, every=5)


def _other_rate(training: _Training) -> None:
    training.optimizer.param_groups[0]["lr"] *= 0.5
    training.step(small_batch())


def _no_step(training: _Training) -> None:
    training.optimizer.step()
    training.step(small_batch())


def _draws(training: _Training) -> None:
    torch.rand(1)
    training.step(small_batch())


def _sets(training: _Training) -> None:
    with torch.no_grad():
        training.model.inner[0].weight.mul_(1.5)
    training.step(small_batch())


CASES: dict[str, tuple[Callable[[_Training], None], str, tuple[str, ...]]] = {
    "values": (_values, "values", tuple(PLANS)),
    "skipped": (_skipped, "values", ("pipeline",)),
    "shapes": (_shapes, "inputs", tuple(PLANS)),
    "evaluates": (_evaluates, "call", ("pipeline", "zero 3")),
    "saves": (_saves, "call", ("pipeline", "zero 3")),
    "first checkpoint": (_first_checkpoint, "call", ("pipeline", "zero 3")),
    "first of every": (_first_checkpoint_every, "call", ("pipeline",)),
    "other rate": (_other_rate, "optimizer", ("data",)),
    "another step": (_no_step, "optimizer", ("data",)),
    "sets": (_sets, "weights", ("data", "zero 3")),
    "draws": (_draws, "random", ("data",)),
}


@captures_of("agreement")
def _drifted(pins: dict[str, Any], names: list[str]) -> list[tuple[str, int, float]]:
    found = []
    for name in names:
        training = _Training(pins)
        start = time.monotonic()
        act = CASES[name][0] if dist.get_rank() == 1 else _goes_on
        with pytest.raises(BatchesDiffer) as caught:
            act(training)
        assert caught.value.ranks == (1,)
        found.append((caught.value.what, caught.value.step, time.monotonic() - start))
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_that_drifts_is_found_in_that_step(pool: Pool, plan: str) -> None:
    names = [name for name, (_, _, plans) in CASES.items() if plan in plans]
    for results in pool.run(2, _drifted, PLANS[plan], names):
        for name, (what, step, seconds) in zip(names, results, strict=True):
            assert (what, step) == (CASES[name][1], STEPS), name
            assert seconds < 10, name


@captures_of("agreement")
def _alone(change: str) -> list[str]:
    """What a step and a checkpoint raise once one rank alone has changed its gradients."""
    training = _Training(PLANS["data"])
    training.optimizer.zero_grad()
    training.model(*small_batch()).backward()
    if dist.get_rank() == 1 and change == "clips":
        nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
    if dist.get_rank() == 1 and change == "one element":
        weight = training.model.inner[0].weight
        assert weight.grad is not None
        weight.grad[-1, -1] = 0.0
    training.optimizer.step()
    found = []
    for act in (lambda: training.step(small_batch()), lambda: _first_checkpoint(training)):
        with pytest.raises(BatchesDiffer) as caught:
            act()
        found.append(caught.value.what)
    return found


def test_one_rank_alone_changes_gradients(pool: Pool) -> None:
    for change in ("clips", "one element"):
        assert pool.run(2, _alone, change) == [["weights"] * 2] * 2


@captures_of("agreement")
def _outside(kind: str) -> str:
    model = Classifier().inner
    graphaccel.optimize(model, devices=2, data=2, timeout=60.0, loss_fn="outside")
    x, _ = small_batch()
    for _ in range(STEPS):
        model(x).sum().backward()
    calls: dict[str, Callable[[], Any]] = {
        "as before": lambda: model(x).sum().backward(),
        "values": lambda: model(x + 1),
        "no backward": lambda: (model(x), model(x)),
    }
    act = calls["as before" if dist.get_rank() == 0 else kind]
    with pytest.raises(BatchesDiffer) as caught:
        act()
    return caught.value.what


def test_where_the_loss_is_outside(pool: Pool) -> None:
    assert pool.run(2, _outside, "values") == ["values", "values"]
    assert pool.run(2, _outside, "no backward") == ["call", "call"]


def _leaves_early() -> None:
    training = _Training(PIPELINE)
    if dist.get_rank() == 0:
        training.step(small_batch())


def test_a_rank_that_leaves_early(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _leaves_early)
    assert caught.value.failures[0].kind == RankLost.__name__
    assert time.monotonic() - start < 40


class Odd(nn.Module):
    """Inputs of every kind beside x [B, 4]; the loss is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor, half: Tensor) -> Tensor:
        y = self.layer(x) * scale * mask.to(x.dtype) + half.to(x.dtype)
        return y.square().mean()


def _odd_inputs(pins: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    plain, planned = Odd().double(), Odd().double()
    planned.load_state_dict(plain.state_dict())
    graphaccel.optimize(planned, devices=2, **pins)
    x = torch.randn(8, 4).double()
    inputs = {"scale": torch.tensor(3.0), "mask": x > 0, "half": torch.randn(8, 4).bfloat16()}
    different = []
    for _ in range(2):
        true, got = plain(x, **inputs), planned(x, **inputs)
        got.backward()
        different.append((true - got).abs().item())
    return different


def test_inputs_without_dims_and_of_other_dtypes(pool: Pool) -> None:
    for different in pool.run(2, _odd_inputs, {"data": 2, "microbatches": 2}):
        assert max(different) <= 1e-14


def _first_batches() -> None:
    model = Classifier()
    graphaccel.optimize(model, devices=2, data=2)
    with pytest.raises(GraphAccelError) as caught:
        model(*small_batch(8 + 4 * dist.get_rank()))
    assert (
        str(caught.value)
        == """\
error[GA404]: at step 0 the batch of rank 1 has other inputs or shapes than rank 0's
  rank 0  runs a training step on args[0] float32[8, 8], args[1] int64[8]
  rank 1  runs a training step on args[0] float32[12, 8], args[1] int64[12]
  why:  every rank is given the global batch and takes its own part of it
  help: seed the shuffling alike on every rank:  torch.manual_seed(0)
  help: and remove the DistributedSampler:  DataLoader(dataset, batch_size=..., shuffle=True)
  help: or keep the sampler, and say that each rank reads its own rows:  optimize(..., batch="local")
  explain: graphaccel explain GA404"""  # noqa: E501
    )


def test_first_batches_of_other_sizes(pool: Pool) -> None:
    pool.run(2, _first_batches)
