"""Indices that a table does not have, and widths that a layer does not take: refused, named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.input_checks import check_indices, check_positions


class Words(nn.Module):
    """`forward(ids)`: [B, S] int64 → mean cross entropy of the next token, with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 4), nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.words(ids) + self.places(places)
        logits = F.linear(hidden, self.words.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _refused(model: nn.Module, ids: Tensor) -> list[str]:
    with pytest.raises(errors.GraphMisuse) as caught:
        model(ids)
    return str(caught.value).splitlines()


def test_indices_beyond_a_table() -> None:
    model = Words()
    graphaccel.optimize(model, devices=1, check="off")
    good = torch.arange(8).repeat(2, 1)
    first = _refused(model, good + 3)
    assert first[0] == "error[GA407]: `args[0]` holds 10, and `words.weight` has rows 0 to 9"
    assert "hidden = self.words(ids) + self.places(places)" in "\n".join(first)
    assert first[-2:] == [
        "  help: give the table more rows, or leave such a batch out",
        "  explain: graphaccel explain GA407",
    ]
    model(good).backward()
    negative = _refused(model, good - 1)
    assert negative[0] == "error[GA407]: `args[0]` holds -1, and `words.weight` has rows 0 to 9"
    long = _refused(model, torch.zeros(2, 9, dtype=torch.int64))
    assert long[0] == (
        "error[GA407]: a sequence of this batch has the position 8, "
        "and `places.weight` has rows 0 to 7"
    )
    model(good[:, :5]).backward()


class Classes(nn.Module):
    """Scores of five classes; labels are padded and shifted as transformers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        labels = labels.masked_fill(labels == 3, -100)
        return F.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("wrong", [5, -1])
@pytest.mark.parametrize("first", [True, False])
def test_labels_beyond_the_classes(wrong: int, first: bool) -> None:
    model = Classes()
    graphaccel.optimize(model, devices=1)
    x = torch.randn(4, 3, 4)
    good = torch.tensor([[0, 3, 4], [1, -100, 2]]).repeat(2, 1)
    bad = good.clone()
    bad[:, 0] = 77  # never read: the first one is shifted away
    if not first:
        model(x, good).backward()
        model(x, bad).backward()
    bad[3, 1] = wrong
    with pytest.raises(errors.GraphMisuse) as caught:
        model(x, bad)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"error[GA407]: `args[1]` holds the label {wrong}, and the loss has classes 0 to 4"
    )
    assert "F.cross_entropy(self.linear(x)" in str(caught.value)
    assert "  help: give the model as many classes, or mend the labels (-100 is ignored)" in lines


def test_a_batch_of_the_wrong_width(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    graphaccel.optimize(model, devices=1, loss_fn=F.mse_loss, check="off")
    model(torch.ones(4, 8), torch.ones(4, 1)).backward()
    with pytest.raises(errors.BatchChanged) as caught:
        model(torch.ones(4, 7), torch.ones(4, 1))
    assert str(caught.value).splitlines() == [
        "error[GA406]: shape of `args[0]` changed: captured with [b, 8], now [4, 7]",
        "  why:  the graph and the plan hold for batches like the captured one only",
        "  help: the model does not run with it: give it the shape [b, 8]",
        "  explain: graphaccel explain GA406",
    ]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # torch's own
    model(torch.ones(2, 8), torch.ones(2, 1)).backward()


class Drawn(nn.Module):
    """Looks up rows that are drawn, and rows by flags: `forward(flags)`, [B] bool → mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 3)

    def forward(self, flags: Tensor) -> Tensor:
        drawn = self.table(torch.randint(0, 2, (4,)))
        return (drawn * self.table(flags.long())).square().mean()


def test_checks_draw_no_random_numbers() -> None:
    flags = torch.tensor([True, False, True, True])
    batch = flatten_call((flags,), {})
    step = capture(Drawn(), batch, symbolic=False)
    before = torch.random.get_rng_state()
    check_indices(step, batch)
    check_positions(step, step.sizes)
    assert torch.equal(torch.random.get_rng_state(), before)
