"""Tensors that a forward keeps for the next one or for the script, and draws that a graph can not
make: the whole texts."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors


class Net(nn.Module):
    """`forward(x [4, 3])` → loss; `use(self, h)` does something with a hidden value."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(3, 2), use
        self.mean, self.state, self.losses = torch.zeros(2), None, []
        self.own = torch.Generator().manual_seed(1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x)).square().mean()


def running_mean(s: Any, h: Tensor) -> Tensor:
    centred = h - s.mean
    s.mean = 0.9 * s.mean + 0.1 * h.detach().mean(0)
    return centred


def written(s: Any, h: Tensor) -> Tensor:
    s.mean.lerp_(h.detach().mean(0), 0.1)
    return h - s.mean


def hidden_state(s: Any, h: Tensor) -> Tensor:
    s.state = h if s.state is None else h + s.state.detach()
    return s.state


def hidden_states(s: Any, h: Tensor) -> Tensor:
    h = h if s.state is None else h + s.state[1]
    s.state = (1, h.detach())
    return h


def replaced(s: Any, h: Tensor) -> Tensor:
    s.seen = h.mean(0)
    return h


def own_generator(s: Any, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=s.own)


def forked(_: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.randn_like(h)
    return h + noise


def left(s: Any, h: Tensor) -> Tensor:
    s.losses = [h.abs().mean()]
    return h


DRAWN = (
    "only torch's default generator is drawn from anew in every step, and is the same on every rank"
)
CARRIED = """\
error[GA106]: `NAME` is a tensor that each forward leaves for the next one
  --> test_kept_tensors.py:LINE
  why:  a graph has the values of its capture there, in every step
  help: hold it in a buffer:  self.register_buffer('NAME', VALUE)
  help: or give it to the forward as an input, and return its new value (with loss_fn='outside')
  explain: graphaccel explain GA106"""
SEEDS = """\
error[GA106]: `Net.forward` seeds torch's generator
  --> test_kept_tensors.py:LINE
  why:  what is drawn behind this line would be other numbers than in the script's model
  help: seed in the script, before the call of the model:  torch.manual_seed(0)
  explain: graphaccel explain GA106"""
OWN = f"""\
error[GA107]: cannot capture `Net.own_generator`: it draws from a `torch.Generator` of its own
  --> test_kept_tensors.py:LINE
  why:  {DRAWN}
  help: leave `generator=` out, and seed before the call of the model:  torch.manual_seed(0)
  explain: graphaccel explain GA107"""
REPLACED = """\
error[GA102]: cannot capture `Net.forward`: this has no graph
  why:  it replaces its buffer `seen` by a value that requires a gradient
  help: self.seen = value.detach()
  explain: graphaccel explain GA102"""
LEFT = """\
error[GA405]: `losses.0` of the model has no value after a step: its forward did not run
  why:  a step runs a graph, which gives what the forward returns and the new values of buffers
  help: add it to the loss in the forward, or return it with the outputs:  return output, value
  help: or hold it in a buffer, to look at it:  self.register_buffer('losses', torch.zeros(()))
  explain: graphaccel explain GA405"""

CASES: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "a running mean": (
        running_mean,
        "centred = h - s.mean",
        CARRIED.replace("NAME", "mean").replace("VALUE", "torch.zeros(2)"),
    ),
    "a tensor written in place": (
        written,
        "s.mean.lerp_(h.detach().mean(0), 0.1)",
        CARRIED.replace("NAME", "mean").replace("VALUE", "self.mean"),
    ),
    "a hidden state": (
        hidden_state,
        "s.state = h if s.state is None else h + s.state.detach()",
        CARRIED.replace("NAME", "state").replace("VALUE", "torch.zeros(4, 2)"),
    ),
    "a tuple of hidden states": (
        hidden_states,
        "h = h if s.state is None else h + s.state[1]",
        CARRIED.replace("`NAME`", "`state.1`")
        .replace("NAME", "state_1")
        .replace("VALUE", "torch.zeros(4, 2)"),
    ),
    "a buffer with a gradient": (replaced, "", REPLACED),
    "a generator of its own": (
        own_generator, "return h + torch.randn(h.shape, generator=s.own)", OWN
    ),
    "a forked generator": (forked, "with torch.random.fork_rng():", SEEDS),
}  # fmt: skip


def text_of(error: errors.GraphAccelError) -> str:
    """Its text without the quoted source."""
    lines = re.sub(r"--> \S*/", "--> ", str(error)).splitlines()
    return "\n".join(x for x in lines if not re.match(r" +\d* \|", x))


def line_of(source: str) -> str:
    lines = linecache.getlines(__file__)
    return str(next(i for i, line in enumerate(lines, 1) if line.strip() == source))


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    use, source, text = CASES[name]
    model = Net(use)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model = graphaccel.optimize(model, devices=1)
    with pytest.raises(errors.GraphAccelError) as caught:
        model(torch.ones(4, 3))
    assert text_of(caught.value) == text.replace("LINE", line_of(source) if source else "")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_an_attribute_for_the_script_is_refused_where_it_is_read() -> None:
    model = graphaccel.optimize(Net(left), devices=1)
    loss = model(torch.ones(4, 3))
    with pytest.raises(errors.OutputDropped) as caught:
        loss + sum(model.losses)
    assert text_of(caught.value) == LEFT
