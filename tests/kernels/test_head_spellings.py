"""The ways in which models say "head and loss": each becomes one fused op, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.kernels.test_fuse import counted, fused, gradients, step_of

WORDS, WIDTH = 40, 16
HEAD = "linear_cross_entropy"
Spelling: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(z: Tensor) -> Tensor:
    return z.reshape(-1, WORDS)


def unreduced(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(rows(F.linear(h, w)), t.view(-1), reduction="none")


SPELLINGS: dict[str, Spelling] = {
    "plain": lambda h, w, t: F.cross_entropy(rows(F.linear(h, w)), t.view(-1)),
    "nanoGPT's ignored label": lambda h, w, t: F.cross_entropy(
        rows(F.linear(h, w)), t.view(-1), ignore_index=-1
    ),
    "padding": lambda h, w, t: F.cross_entropy(rows(F.linear(h, w)), t.view(-1), ignore_index=0),
    "transposed weight": lambda h, w, t: F.cross_entropy(rows(h @ w.t()), t.view(-1)),
    "turned weight": lambda h, w, t: F.cross_entropy(rows(torch.matmul(h, w.T)), t.view(-1)),
    "rows first": lambda h, w, t: F.cross_entropy(F.linear(h.reshape(-1, WIDTH), w), t.view(-1)),
    "rows alone": lambda h, w, t: F.cross_entropy(F.linear(h[0] * 2, w), t[0]),
    "one position on": lambda h, w, t: F.cross_entropy(
        rows(F.linear(h, w)[:, :-1]), t[:, 1:].reshape(-1)
    ),
    "one position on, copied": lambda h, w, t: F.cross_entropy(
        F.linear(h, w)[..., :-1, :].contiguous().view(-1, WORDS),
        t[..., 1:].contiguous().view(-1),
    ),
    "classes second": lambda h, w, t: F.cross_entropy(F.linear(h, w).transpose(1, 2), t),
    "logarithms": lambda h, w, t: F.nll_loss(
        rows(F.log_softmax(F.linear(h, w), dim=-1)), t.view(-1)
    ),
    "logarithms of rows": lambda h, w, t: F.nll_loss(
        F.log_softmax(rows(F.linear(h, w)), dim=1), t.view(-1), ignore_index=0
    ),
    "averaged by hand": lambda h, w, t: unreduced(h, w, t).mean(),
    "summed by hand": lambda h, w, t: unreduced(h, w, t).sum() / 7,
}
OTHERS: dict[str, Spelling] = {
    "weighted": lambda h, w, t: (unreduced(h, w, t) * torch.arange(t.numel())).sum(),
    "logarithms over positions": lambda h, w, t: F.nll_loss(
        rows(F.log_softmax(F.linear(h, w), dim=1)), t.view(-1)
    ),
    "averaged logarithms": lambda h, w, t: (
        F.nll_loss(rows(z := F.log_softmax(F.linear(h, w), -1)), t.view(-1)) + z.mean()
    ),
}


class Head(nn.Module):
    """[2, 6, 16] and labels [2, 6] -> a loss."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling, self.weight = spelling, nn.Parameter(torch.randn(WORDS, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.spelling(self.inner(x), self.weight, labels)


def given(spelling: Spelling) -> tuple[Head, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Head(spelling).double()
    return model, (torch.randn(2, 6, WIDTH).double(), torch.randint(0, WORDS, (2, 6)))


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_is_one_op(name: str) -> None:
    model, batch = given(SPELLINGS[name])
    if "ignored" in name:
        batch[1][0, 2:] = -1
    rewritten = fused(step_of(model, *batch), HEAD, "cross_entropy")
    assert counted(rewritten) == {HEAD: 1}
    loss = model(*batch)
    wanted = (loss, *torch.autograd.grad(loss, list(model.parameters())))
    for made, right in zip(gradients(rewritten, model, batch), wanted, strict=True):
        torch.testing.assert_close(made, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
def test_look_alikes_are_left_alone(name: str) -> None:
    model, batch = given(OTHERS[name])
    step = step_of(model, *batch)
    rewritten = fused(step, HEAD, "cross_entropy")
    assert HEAD not in counted(rewritten)
    loss = model(*batch)
    wanted = (loss, *torch.autograd.grad(loss, list(model.parameters())))
    for made, right in zip(gradients(rewritten, model, batch), wanted, strict=True):
        torch.testing.assert_close(made, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("op", [HEAD, "cross_entropy"])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_without_a_label_there_is_no_gradient(op: str, ignored: int) -> None:
    """The mean over no label is no number; its gradient is 0, as eager has it."""
    model, (x, labels) = given(
        lambda h, w, t: F.cross_entropy(rows(F.linear(h, w)), t.view(-1), ignore_index=ignored)
    )
    batch = x, torch.full_like(labels, ignored)
    rewritten = fused(step_of(model, *batch), op)
    assert counted(rewritten) == {op: 1}
    loss, *found = gradients(rewritten, model, batch)
    assert loss.isnan()
    assert all((g == 0).all() for g in found)


@pytest.mark.parametrize("fusions", [("layer_norm",), ()])
def test_a_plan_that_has_fused_ops_has_the_fused_step(fusions: tuple[str, ...]) -> None:
    """Wherever the plan came from; who steps with what is not fused is told why."""
    plain = SPELLINGS["plain"]
    model, batch = given(lambda h, w, t: plain(F.layer_norm(h, (WIDTH,)), w, t))
    plan = graphaccel.plan(model, batch, devices=1, fusions=fusions)
    optimizer = torch.optim.Adagrad(model.parameters())
    model, optimizer = graphaccel.optimize(model, optimizer, plan=plan)
    model(*batch).backward()
    optimizer.step()
    assert bool(model.graphaccel.left_to_torch) == bool(fusions)
