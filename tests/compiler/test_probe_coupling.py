"""Which optimizers couple their parameters, and which state has the shape of its parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphaccel.compiler.probe_coupling import coupling_of
from tests.gloo.scripts.test_whole_matrices import ByNorm, TwoSided


class Noisy(TwoSided):
    """Draws random numbers in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p += torch.randn_like(p)


class Counted(TwoSided):
    """Counts in a tensor and a list of its group, in a tensor of its own, and under a name in its
    state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = torch.zeros(())
        self.param_groups[0] |= {"count": torch.zeros(()), "steps": []}
        self.state["count"] = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.state["count"][0] += 1
        for group in self.param_groups:
            group["count"] += 1
            group["steps"].append(1)
            for p in group["params"]:
                p -= p.grad * group["lr"] / (group["count"] + self.state["count"][0])


class InParts(torch.optim.Optimizer):
    """Steps a list of other optimizers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.parts = [Counted([p], lr) for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def _of(kind: type, bias: bool = False) -> Any:
    return coupling_of(kind(nn.Linear(3, 4, bias=bias).parameters(), lr=0.1))


def test_state_of_the_parameters_shape() -> None:
    assert _of(torch.optim.AdamW, bias=True).full == {
        (dims, key) for dims in (1, 2) for key in ("exp_avg", "exp_avg_sq")
    }
    assert _of(TwoSided).full == set()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_muon_and_adafactor() -> None:
    assert _of(torch.optim.Muon).full == {(2, "momentum_buffer")}
    assert _of(torch.optim.Adafactor, bias=True).full == {(1, "variance")}


@pytest.mark.parametrize("kind", [torch.optim.SGD, TwoSided])
def test_by_itself(kind: type) -> None:
    known = _of(kind)
    assert not known.dependent
    assert not known.unknown


def test_a_norm_over_all_gradients_couples() -> None:
    assert _of(ByNorm).dependent


def test_what_cannot_be_stepped_is_unknown() -> None:
    noisy = Noisy(nn.Linear(3, 4).parameters(), lr=0.1)
    before = torch.get_rng_state()
    assert coupling_of(noisy).unknown == "its step draws random numbers"
    assert torch.equal(before, torch.get_rng_state())
    assert "closure" in _of(torch.optim.LBFGS).unknown


def test_counts_of_the_optimizer_are_left_as_they_are() -> None:
    optimizer = Counted(nn.Linear(3, 4, bias=False).parameters(), lr=0.1)
    known = coupling_of(optimizer)
    assert not known.unknown
    assert not known.dependent
    (group,) = optimizer.param_groups
    assert (optimizer.count, group["count"]) == (0, 0)
    assert (optimizer.state["count"], group["steps"]) == ([0], [])


def test_optimizers_in_a_list_are_not_stepped() -> None:
    optimizer = InParts(nn.Linear(3, 4).parameters(), lr=0.1)
    assert coupling_of(optimizer).unknown == "it steps another optimizer, `parts[0]`"
    assert [part.count for part in optimizer.parts] == [0, 0]
