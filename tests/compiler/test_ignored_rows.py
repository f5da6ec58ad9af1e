"""A smaller last batch: completed with rows that add nothing, or refused; equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.ignored_rows import IgnoredRows, ignored_rows

Loss = Callable[..., Tensor]
CLASSES = 6


def shifted(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Of the next token, as Hugging Face's models compute it."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def own_index(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Of labels of which zero means none."""
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0)


def masked(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Divided by a count of a mask."""
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def selected(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Of the labels that are not negative, by `where`."""
    known = labels >= 0
    each = -F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(known, each, 0.0).sum() / known.sum()


def plain_mean(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Over all rows."""
    return (logits.sum(-1) - labels).square().mean()


def balanced(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """With a term that depends on every row."""
    return shifted(logits, labels, _) + logits.mean((0, 1)).square().sum()


class Tagger(nn.Module):
    """`forward(tokens, mask, labels)`, all [B, 5] → {"loss", "logits" [B, 5, 6]}."""

    def __init__(self, loss: Loss, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(8, 4), nn.Linear(4, CLASSES)
        self.loss, self.norm = loss, nn.Identity() if norm is None else norm

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(torch.tanh(self.words(tokens)).transpose(1, 2)).transpose(1, 2)
        logits = self.out(hidden)
        return {"loss": self.loss(logits, labels, mask), "logits": logits}


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask and labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 8, (rows, 5), generator=generator)
    mask = torch.rand(rows, 5, generator=generator).gt(0.3).double()
    labels = torch.randint(0, CLASSES, (rows, 5), generator=generator)
    labels[0, :3] = -100
    return tokens, mask, labels


@pytest.mark.parametrize(
    ("loss", "mark"),
    [(shifted, (2, -100)), (own_index, (2, 0)), (masked, (1, 0)), (selected, (2, -1))],
)
def test_smaller_batches_train_as_eager_does(
    loss: Loss, mark: tuple[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    plain = Tagger(loss).double()
    if loss is own_index:
        plain.loss = lambda logits, labels, mask: own_index(logits, labels.clamp(min=0), mask)
    ours = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    graphaccel.optimize(ours, optimizer, devices=1, microbatches=2, outputs="all", check="off")
    for step, rows in enumerate((4, 3, 1, 5)):
        results = []
        for model in (plain, ours):
            model.zero_grad()
            made = model(*batch(rows, step))
            made["loss"].backward()
            grads = [p.grad for p in model.parameters()]
            results.append([made["loss"].detach(), made["logits"].detach(), *grads])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    leaf, value = mark
    said = f"3 rows are completed to 4 with rows that add nothing (args[{leaf}] = {value})"
    assert said in capsys.readouterr().err


def _found(model: nn.Module, *args: Any, loss_fn: Any = None) -> IgnoredRows | str:
    return ignored_rows(capture(model, flatten_call(args, {}), loss_fn))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Tagger(plain_mean), "its loss has no input that marks a row as ignored"),
        (Tagger(balanced), "its loss has no input that marks a row as ignored"),
        (Tagger(shifted, nn.BatchNorm1d(4)), "it has an op that needs all examples at once"),
    ],
)
def test_what_ignored_rows_would_change(model: nn.Module, reason: str) -> None:
    assert _found(model.double(), *batch(4)) == reason


class Reading(nn.Module):
    """Tokens [B, 5] that are the labels, too: `mark` is the label that the loss ignores."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], mark: int) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.rand(8, 4)), nn.Linear(4, 8)
        self.read, self.mark = read, mark

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.out(self.read(self.table, tokens)).transpose(1, 2)
        return F.cross_entropy(logits, tokens, ignore_index=self.mark)


@pytest.mark.parametrize(
    "read",
    [
        lambda table, tokens: F.embedding(tokens, table),
        lambda table, tokens: table.index_select(0, tokens.flatten()).view(*tokens.shape, 4),
        lambda table, tokens: table[:, :1].expand(8, 5).gather(0, tokens).unsqueeze(-1) + table[0],
    ],
)
def test_a_mark_that_no_table_has(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A label that is read from a table is no mark where the table does not have it."""
    tokens = batch(4)[0]
    found = _found(Reading(read, 3).double(), tokens)
    assert isinstance(found, IgnoredRows)
    assert (found.leaf, found.value) == (0, 3)
    for mark in (-100, 8):
        reason = "its loss has no input that marks a row as ignored"
        assert _found(Reading(read, mark).double(), tokens) == reason


class Summed(nn.Module):
    """Counts, of a batch [B, 3] and labels [B], what an output or a buffer tells of all rows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.out, self.where = nn.Linear(3, 2), where
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(x)
        made = {"loss": F.cross_entropy(logits, labels)}
        if self.where == "buffer":
            self.seen += logits.detach().sum()
        else:
            made["total"] = logits.detach().sum()
        return made


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("buffer", "its buffer seen depends on every row"),
        ("output", "its output 1 depends on every row"),
    ],
)
def test_results_of_all_rows(where: str, reason: str) -> None:
    assert _found(Summed(where), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])) == reason


def test_the_text() -> None:
    model = Tagger(plain_mean).double()
    graphaccel.optimize(model, devices=1, microbatches=2, check="off")
    model(*batch(4))
    with pytest.raises(errors.BatchNotDivisible) as caught:
        model(*batch(3))
    assert str(caught.value) == (
        "error[GA206]: a batch of 3 can not be cut into 2 equal parts (2 microbatches x data 1), "
        "and rows to complete it would change the result\n"
        "  why:  its loss has no input that marks a row as ignored\n"
        "  help: leave a last, smaller batch out:  "
        "DataLoader(dataset, batch_size=..., drop_last=True)\n"
        "  help: or use a batch that is a multiple of 2\n"
        "  explain: graphaccel explain GA206"
    )
    model(*batch(2))["loss"].backward()
