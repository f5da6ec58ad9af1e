"""Which steps are compared after the first capture, and what is said where one is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import CaptureDiffers
from tests.proof.models import Net, Reverse, batch, seeded


@pytest.fixture
def said(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "0")
    return capsys


def lines(said: pytest.CaptureFixture) -> list[str]:
    """What was said of proofs since the last time."""
    return [line for line in said.readouterr().err.splitlines() if "proved" in line]


class Branching(Net):
    """Takes another way where `way` says so, which is wrong in a capture if it is "wrong"."""

    way = "first"

    def __init__(self) -> None:
        super().__init__(Branching.choose)

    @staticmethod
    def choose(net: nn.Module, x: Tensor) -> Tensor:
        """The middle of the model."""
        if net.way == "first":
            return x
        if net.way == "wrong" and not torch.compiler.is_exporting():
            return Reverse.apply(x)
        return torch.tanh(x)


def test_a_later_capture_is_compared_too(said: pytest.CaptureFixture) -> None:
    model = seeded(Branching)
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    for way, count in (("first", 2), ("first", 0), ("second", 2), ("first", 0)):
        model.way = way
        model(*batch().leaves).backward()
        assert [": proved" in line for line in lines(said)] == [True] * count
    model.way = "wrong"
    for _ in range(2):
        with pytest.raises(CaptureDiffers):
            model(*batch().leaves)
    model.way = "second"
    model(*batch().leaves).backward()


@pytest.mark.parametrize("loaded", [False, True], ids=["as they were", "loaded"])
def test_an_example_is_compared_at_the_first_step(
    said: pytest.CaptureFixture, loaded: bool
) -> None:
    model = seeded(Net)
    state = {k: 2 * v for k, v in model.state_dict().items()}
    inputs = batch().leaves
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1, example_batch=inputs)
    assert len(lines(said)) == 1
    if loaded:
        model.load_state_dict(state)
    model(*(3 * x for x in inputs)).backward()
    (line,) = lines(said)
    assert ": proved     loss and 6 gradients of the plan's step equal one device's" in line


class Counting(nn.Module):
    """Returns a buffer that it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.seen += 1.0
        return self.net(x), self.net.weight, self.seen


def test_an_output_that_is_a_buffer_is_compared_as_it_was_returned() -> None:
    model = Counting()
    model, optimizer = graphaccel.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1, loss_fn="outside"
    )
    for step in range(3):
        out, weight, seen = model(torch.ones(4, 4))
        (out.pow(2).mean() + weight.pow(2).mean()).backward()
        optimizer.step()
        assert seen.tolist() == [step + 1.0] * 2
