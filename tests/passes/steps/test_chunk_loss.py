"""A fused head and loss processes as many rows at a time as the plan says."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphaccel.ir.program import StageProgram
from graphaccel.kernels.registry import fusion_named
from graphaccel.passes.microbatch.chunk_loss import chunk_loss
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import program_of, text_of

TEXT = """\
forward(parameter w, batch #0, batch #1) -> (loss, saved dx)
%w: f64[5,3] = input
%x: f64[16,3] = input
%y: i64[16] = input
%linear_cross_entropy: (f64[], f64[16,3], f64[5,3], f64[5]) = graphaccel.linear_cross_entropy(%x, %w, None, %y, -100, CHUNK)    # forward a
%getitem: f64[] = getitem(%linear_cross_entropy, 0)    # forward a
%getitem_1: f64[16,3] = getitem(%linear_cross_entropy, 1)    # forward a
return (%getitem, %getitem_1)
backward first last() -> ()
return ()
"""
ROWS = 8
BEFORE, AFTER = (TEXT.replace("CHUNK", str(rows)) for rows in (0, ROWS))


@pytest.fixture(autouse=True)
def _defined() -> None:
    fusion_named("linear_cross_entropy")  # defines its op


def before() -> StageProgram:
    return program_of(BEFORE)


def test_text() -> None:
    assert text_of(chunk_loss(before(), Plan(1, loss_chunk=ROWS))) == AFTER


def test_nothing_changes_without_a_number() -> None:
    assert text_of(chunk_loss(before(), Plan(1))) == BEFORE


def test_values() -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (5, 16))
    y = torch.randint(5, (16,), generator=generator)
    results: list[list[Tensor]] = [
        list(program.forward(w, x, y))
        for program in (before(), chunk_loss(before(), Plan(1, loss_chunk=ROWS)))
    ]
    leaf = x.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf @ w.T, y, reduction="sum")
    loss.backward()
    for result, gradient in results:
        torch.testing.assert_close(result, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-15)
