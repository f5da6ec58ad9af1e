"""Ranks that read their own rows train as one device does on all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import graphaccel
from graphaccel.errors import BadPin, BatchesDiffer, GraphMisuse
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

ROWS = 4  # of each rank


class Classifier(nn.Module):
    """[B, 6], or [6, B] where `last`; the loss is of the model where it is given targets."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.head, self.last = nn.LayerNorm(6), nn.Linear(6, 3), last

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        x = x.t() if self.last else x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        scores = self.head(self.norm(x))
        if targets is None:
            return scores
        loss = F.cross_entropy(scores, targets, ignore_index=-100)
        return {"loss": loss, "scores": scores.t() if self.last else scores}


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Global batches of two ranks; ranks have other numbers of labels that count."""
    generator = torch.Generator().manual_seed(3)
    results = []
    for _ in range(count):
        x = torch.randn(2 * ROWS, 6, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, 3, (2 * ROWS,), generator=generator)
        targets[: ROWS - 1] = -100
        results.append((x, targets))
    return results


def _pair(pins: dict[str, Any], **model: Any) -> tuple[list[nn.Module], list[Any], slice]:
    torch.manual_seed(0)
    plain = Classifier(**model).double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=2, batch="local", **pins)
    first = dist.get_rank() * ROWS
    return [plain, ours], optimizers, slice(first, first + ROWS)


def _apart(plain: nn.Module, ours: nn.Module) -> float:
    state = graphaccel.full_state_dict(ours)
    return max((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())


def _trained(pins: dict[str, Any]) -> float:
    """Largest difference of losses, scores and weights from one device with all rows."""
    (plain, ours), optimizers, own = _pair({"outputs": "all", **pins})
    furthest = 0.0
    for x, targets in batches():
        wanted, built = plain(x, targets), ours(x[own], targets[own])
        assert built["scores"].shape == (ROWS, 3)
        furthest = max(furthest, (built["scores"] - wanted["scores"][own]).abs().max().item())
        furthest = max(furthest, abs(built["loss"].item() - wanted["loss"].item()))
        for output, optimizer in zip((wanted, built), optimizers, strict=True):
            optimizer.zero_grad()
            output["loss"].backward()
            optimizer.step()
    x, _ = batches(1)[0]
    with torch.no_grad():
        furthest = max(furthest, (plain.eval()(x)[own] - ours.eval()(x[own])).abs().max().item())
    return max(furthest, _apart(plain, ours))


@pytest.mark.parametrize(
    "pins",
    [
        {"data": 2},
        {"data": 2, "zero": 3},
        {"tensor": 2},
        {"pipeline": 2, "microbatches": 2},
    ],
    ids=str,
)
def test_a_loss_of_the_model_is_that_of_all_rows(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _trained, pins)) < 1e-12


def _outside(split: bool) -> float:
    """A loss of the script: its gradients are the mean over the ranks. split: rank 1 adds a loss of
    another output."""
    (plain, ours), optimizers, own = _pair({"data": 2})
    for x, targets in batches():
        targets = targets.clamp(min=0)
        losses = []
        for rank in range(2):
            rows = slice(rank * ROWS, (rank + 1) * ROWS)
            losses.append(F.cross_entropy(plain(x[rows]), targets[rows]))
        if split:
            losses[1] = losses[1] * 3
        optimizers[0].zero_grad()
        (sum(losses) / 2).backward()
        loss = F.cross_entropy(ours(x[own]), targets[own])
        optimizers[1].zero_grad()
        (loss * 3 if split and dist.get_rank() else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    return _apart(plain, ours)


@pytest.mark.parametrize("split", [False, True])
def test_gradients_of_a_loss_of_the_script_are_the_mean_over_ranks(pool: Pool, split: bool) -> None:
    assert max(pool.run(2, _outside, split)) < 1e-12


class Two(nn.Module):
    """Two outputs, and one without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x), self.b(x), self.b.weight.square().sum()


def _other_outputs() -> float:
    torch.manual_seed(0)
    plain = Two().double()
    ours = copy.deepcopy(plain)
    graphaccel.optimize(ours, devices=2, batch="local", data=2, loss_fn="outside")
    x, _ = batches(1)[0]
    first, rank = dist.get_rank() * ROWS, dist.get_rank()
    a, b, size = plain(x)
    (a[:ROWS].sum() / 2 + b[ROWS:].sum() / 2 + 0.5 * size).backward()
    a, b, size = ours(x[first : first + ROWS])
    ((b.sum() + size) if rank else a.sum()).backward()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


def test_ranks_may_use_other_outputs(pool: Pool) -> None:
    assert max(pool.run(2, _other_outputs)) < 1e-12


def _sampled() -> float:
    """A script as it is written for DistributedDataParallel."""
    (plain, ours), optimizers, _ = _pair({"data": 2})
    x, targets = (torch.cat(part) for part in zip(*batches(), strict=True))
    data = TensorDataset(x, targets.clamp(min=0))
    loader = DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data, shuffle=True))
    rest = [DistributedSampler(data, 2, rank, shuffle=True) for rank in range(2)]
    orders = [DataLoader(data, batch_size=ROWS, sampler=sampler) for sampler in rest]
    for mine, *parts in zip(loader, *orders, strict=True):
        optimizers[0].zero_grad()
        plain(*(torch.cat(both) for both in zip(*parts, strict=True)))["loss"].backward()
        optimizers[1].zero_grad()
        ours(*mine)["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
    return _apart(plain, ours)


def test_a_distributed_sampler_stays(pool: Pool) -> None:
    assert max(pool.run(2, _sampled)) < 1e-12


def _refused(kind: str) -> str:
    (_, ours), _, own = _pair({"data": 2}, last=kind == "dims")
    x, targets = batches(1)[0]
    mine, labels = x[own], targets[own].clamp(min=0)
    if kind == "rows" and dist.get_rank() == 1:
        mine, labels = mine[1:], labels[1:]
    if kind == "dims":
        mine = mine.t()[:, :ROWS].contiguous()
    if kind == "gradient":
        mine = mine.clone().requires_grad_()
    try:
        ours(mine, labels)
    except (BatchesDiffer, GraphMisuse) as error:
        return str(error)
    return ""


def test_ranks_with_other_numbers_of_rows_are_refused(pool: Pool) -> None:
    first, second = pool.run(2, _refused, "rows")
    assert first == second
    assert first.startswith(
        "error[GA404]: at step 0 the part of the batch of rank 1 has other inputs or shapes than "
        "rank 0's\n"
    )
    assert "drop_last=True" in first


def test_an_input_with_a_gradient_is_refused(pool: Pool) -> None:
    text = pool.run(2, _refused, "gradient")[0]
    assert text.startswith("error[GA407]: `args[0]` requires a gradient")
    assert "give every rank the global batch" in text


def test_other_batch_dims_are_refused_or_given(pool: Pool) -> None:
    text = pool.run(2, _refused, "dims")[0]
    assert "inputs of rank 1 that were not found to have rows differ from rank 0's" in text
    assert "batch_dims={'x': 1}" in text
    assert max(pool.run(2, _given_dims)) < 1e-12


def _given_dims() -> float:
    (plain, ours), optimizers, own = _pair({"data": 2, "batch_dims": {"x": 1}}, last=True)
    for x, targets in batches():
        optimizers[0].zero_grad()
        plain(x.t().contiguous(), targets)["loss"].backward()
        optimizers[1].zero_grad()
        ours(x[own].t().contiguous(), targets[own])["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
    return _apart(plain, ours)


def test_another_word_is_refused() -> None:
    with pytest.raises(BadPin) as caught:
        graphaccel.optimize(Classifier(), devices=1, batch="mine")
    assert "each rank passes the global batch, or its own rows" in str(caught.value)


def _same_rows(seeded: bool) -> str:
    """As a script that seeds torch's generator by the rank, as for DistributedDataParallel."""
    torch.manual_seed(1337 + dist.get_rank())
    model = Classifier()
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), 0.1), devices=2, batch="local")
    own = torch.Generator().manual_seed(dist.get_rank()) if seeded else None
    x, targets = torch.randn(ROWS, 6, generator=own), torch.ones(ROWS, dtype=torch.int64)
    try:
        model(x, targets)["loss"].backward()
    except GraphMisuse as refused:
        return str(refused)
    return ""


def test_rows_that_all_ranks_draw_alike_are_refused(pool: Pool) -> None:
    """They would count twice, and nobody would see it."""
    text = """\
error[GA407]: all ranks pass the same rows, where batch="local" says that each has its own: optimize() gives them the random states of rank 0
  help: draw rows from a generator of each rank:  torch.Generator().manual_seed(torch.distributed.get_rank())
  help: or, if they are meant to be the same:  graphaccel.optimize(model, optimizer)
  explain: graphaccel explain GA407"""  # noqa: E501
    assert pool.run(2, _same_rows, False) == [text, text]
    assert pool.run(2, _same_rows, True) == ["", ""]
