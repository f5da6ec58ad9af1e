"""Language models over [time, batch] tokens, as tutorials train them: rows of every position and
example in one dim, hidden states from batch to batch, a shorter batch last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.support.captures import captures_of
from tests.support.inside import captures_in
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

TOKENS, WIDTH, EXAMPLES, LENGTH = 11, 8, 4, 4
OUTSIDE: dict[str, Any] = {"data": 2}
RETURNED: dict[str, Any] = {"data": 2, "zero": 3, "microbatches": 2, "outputs": "all"}


class Recurrent(nn.Module):
    """`forward(tokens, hidden)`: [time, batch] and the state before → log probabilities
    [time * batch, TOKENS] and the state after; with labels, [time * batch], their loss first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(TOKENS, WIDTH), getattr(nn, kind)(WIDTH, WIDTH, 2)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, hidden: Any, labels: Tensor | None = None) -> Any:
        out, hidden = self.rnn(self.embed(tokens), hidden)
        scores = F.log_softmax(self.head(out).view(-1, TOKENS), dim=1)
        found = scores, hidden
        return found if labels is None else (F.nll_loss(scores, labels.reshape(-1)), *found)


class Attending(nn.Module):
    """The same without a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, hidden: Any) -> Any:
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        out = self.head(self.layers(self.embed(tokens), mask=mask))
        return F.log_softmax(out, dim=-1).view(-1, TOKENS), hidden


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent("LSTM"),
    "GRU": lambda: Recurrent("GRU"),
    "attention": Attending,
}


def _detached(hidden: Any) -> Any:
    if hidden is None or isinstance(hidden, Tensor):
        return None if hidden is None else hidden.detach()
    return tuple(map(_detached, hidden))


def _trained(name: str, pins: dict[str, Any] | None) -> list[Tensor]:
    """The losses, the scores of the last batch, those of an evaluation, and the weights."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    text = torch.randint(TOKENS, (2 * LENGTH + 3, EXAMPLES))
    returned = pins is not None and "outputs" in pins
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    zeros = torch.zeros(2, EXAMPLES, WIDTH, dtype=torch.float64)
    hidden: Any = {"LSTM": (zeros, zeros), "GRU": zeros}.get(name)
    found = []
    for start in range(0, len(text) - 1, LENGTH):
        tokens, labels = text[start : start + LENGTH][: len(text) - 1 - start], text[start + 1 :]
        labels = labels[: len(tokens)]
        optimizer.zero_grad()
        if returned:
            loss, scores, hidden = model(tokens, _detached(hidden), labels)
        else:
            scores, hidden = model(tokens, _detached(hidden))
            loss = F.nll_loss(scores, labels.reshape(-1))
        loss.backward()
        optimizer.step()
        found += [loss.detach(), scores.detach()]
    model.eval()
    with torch.no_grad():
        found.append(model(text[:LENGTH], _detached(hidden))[0])
    state = model.state_dict() if pins is None else graphaccel.full_state_dict(model)
    return [*found, *state.values()]


@captures_of("language models")
def _difference(name: str, pins: dict[str, Any]) -> float:
    pairs = zip(_trained(name, pins), _trained(name, None), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_over_data(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _difference, name, OUTSIDE)) <= 1e-12


def test_on_one_device() -> None:
    assert _difference("LSTM", {"devices": 1}) <= 1e-12


def test_rows_that_are_returned_beside_a_loss(pool: Pool) -> None:
    assert max(pool.run(2, _difference, "GRU", RETURNED)) <= 1e-12


class Weighted(nn.Module):
    """Its loss weights the rows of all positions and examples with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attending = Attending()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores, _ = self.attending(tokens, None)
        weights = scores[:, 0].softmax(0)
        return (F.nll_loss(scores, labels.reshape(-1), reduction="none") * weights).sum()


@captures_of("weighted rows")
def _lengths(pins: dict[str, Any]) -> tuple[float, int]:
    """Lengths after that of the capture: longer, a multiple of it, shorter."""
    losses: list[list[float]] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Weighted().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            graphaccel.optimize(model, optimizer, batch_dims={0: 1, 1: 1}, **pins)
        losses.append([])
        for length in (6, 10, 12, 4):
            optimizer.zero_grad()
            loss = model(*torch.randint(TOKENS, (2, length, EXAMPLES)))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    off = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return off, len(captures_in(model).steps)


@pytest.mark.parametrize(
    "pins", [{"data": 2}, {"data": 1, "pipeline": 2, "microbatches": 2}], ids=str
)
def test_rows_of_other_lengths_than_captured(pool: Pool, pins: dict[str, Any]) -> None:
    for off, captures in pool.run(2, _lengths, pins):
        assert off <= 1e-12
        assert captures == 1
