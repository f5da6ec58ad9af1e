"""What the forward saves, value by value: text, the same bits, and what is never computed again."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import graphaccel
from graphaccel.passes.activations.choose_saved import choose_saved
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import assert_same_bits, joint, text_of_graph
from tests.support.gpt import GPT

BEFORE = """\
%x: f64[4,3] = input
%w: f64[3,3] = input
%mm: f64[4,3] = aten.mm(%x, %w)    # forward h.0
%exp: f64[4,3] = aten.exp(%mm)    # forward h.0
%tanh: f64[4,3] = aten.tanh(%exp)    # forward h.0
%mm_1: f64[4,3] = aten.mm(%tanh, %w)    # forward h.0
%sum_1: f64[] = aten.sum(%mm_1)    # forward
%ones_like: f64[4,3] = aten.ones_like(%mm_1)    # backward
%mul: f64[4,3] = aten.mul.Tensor(%ones_like, %exp)    # backward h.0
%mul_1: f64[4,3] = aten.mul.Tensor(%mul, %tanh)    # backward h.0
%t: f64[3,4] = aten.t(%x)    # backward h.0
%mm_2: f64[3,3] = aten.mm(%t, %mul_1)    # backward h.0
return (%sum_1, %mm_2)
"""
AFTER = """\
%x: f64[4,3] = input
%w: f64[3,3] = input
%mm: f64[4,3] = aten.mm(%x, %w)    # forward h.0
%exp: f64[4,3] = aten.exp(%mm)    # forward h.0
%tanh: f64[4,3] = aten.tanh(%exp)    # forward h.0
%mm_1: f64[4,3] = aten.mm(%tanh, %w)    # forward h.0
%sum_1: f64[] = aten.sum(%mm_1)    # forward
%ones_like: f64[4,3] = aten.ones_like(%mm_1)    # backward
%exp_1: f64[4,3] = aten.exp(%mm)    # backward h.0 by choose_saved
%mul: f64[4,3] = aten.mul.Tensor(%ones_like, %exp_1)    # backward h.0
%tanh_1: f64[4,3] = aten.tanh(%exp_1)    # backward h.0 by choose_saved
%mul_1: f64[4,3] = aten.mul.Tensor(%mul, %tanh_1)    # backward h.0
%t: f64[3,4] = aten.t(%x)    # backward h.0
%mm_2: f64[3,3] = aten.mm(%t, %mul_1)    # backward h.0
return (%sum_1, %mm_2)
"""


def applied() -> fx.GraphModule:
    return choose_saved(joint(BEFORE), Plan(1), {})


def test_text() -> None:
    assert text_of_graph(applied()) == AFTER


def test_values() -> None:
    assert_same_bits(joint(BEFORE), applied())


def test_what_another_stage_reads_is_saved() -> None:
    graph = joint(BEFORE)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["origin"] = "before" if node.name in ("mm", "exp") else "after"
    made = choose_saved(graph, Plan(2, pipeline=2, cuts=("before",)), {"before": 0, "after": 1})
    text = text_of_graph(made)
    assert "%exp_1" not in text
    assert "%tanh_1: f64[4,3] = aten.tanh(%exp)    # backward h.0 by choose_saved" in text


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_is_that_of_eager_in_float64(microbatches: int) -> None:
    torch.manual_seed(0)
    model = GPT(32, 8, 16, 2, 2).double()
    batch = {"input_ids": torch.randint(32, (4, 8)), "labels": torch.randint(32, (4, 8))}
    loss = model(**batch)
    right = torch.autograd.grad(loss, list(model.parameters()))
    optimized = graphaccel.optimize(
        model, devices=1, microbatches=microbatches, min_cut=True, example_batch=batch
    )
    made = optimized(**batch)
    made.backward()
    torch.testing.assert_close(made.detach(), loss.detach(), rtol=1e-12, atol=0)
    for own, other in zip((p.grad for p in model.parameters()), right, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    assert optimized.graphaccel.plan.min_cut
