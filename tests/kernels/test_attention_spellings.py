"""Attention as people write it is found, is equal, and says whether it is causal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.kernels.registry import fusion_named
from graphaccel.passes.fusion.fuse import find_sites
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.pipeline import placed_fusions
from graphaccel.planner.plan.plan import Plan
from tests.kernels.test_fuse import AUTOCAST, fused, gradients, same, step_of

aten = torch.ops.aten
LOW = -1e30


class Attention(nn.Module):
    """One layer of attention [b, s, 16] -> a number; `form`: how scores become probabilities."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(1, 4, 6, 6))
        self.register_buffer("causal", torch.tril(torch.ones(6, 6))[None, None])
        self.register_buffer("mask", torch.randn(1, 1, 6, 6))

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        s, divisor = torch.matmul(q, k.transpose(2, 3)), math.sqrt(4.0)
        at = torch.arange(s.shape[-1])
        zero = torch.zeros((), dtype=s.dtype)
        seen = at[None, None, None, :] <= at[None, None, :, None]
        forms = {
            "transformers": lambda: (s * 0.5 + self.mask).softmax(-1, dtype=s.dtype),
            "divided": lambda: (s / divisor + self.mask).softmax(-1),
            "divided, no mask": lambda: (s / 3).softmax(-1),
            "mask first": lambda: (self.mask + s * 0.5).softmax(-1),
            "T5": lambda: (s + self.bias + self.mask).softmax(-1),
            "learned bias": lambda: (s + self.bias).softmax(-1),
            "q is scaled": lambda: (torch.matmul(q * 0.5, k.transpose(-1, -2))).softmax(-1),
            "nanoGPT": lambda: (
                (s * 0.5).masked_fill(self.causal[:, :, :6, :6] == 0, float("-inf")).softmax(-1)
            ),
            "added causal": lambda: (
                s * 0.5 + torch.where(seen, zero, torch.finfo(s.dtype).min)
            ).softmax(-1),
            "added window": lambda: (
                s * 0.5 + torch.where(seen & (at[None] > at[:, None] - 3), zero, LOW)
            ).softmax(-1),
            "one row": lambda: (s * 0.5 + self.mask[0, 0, 0]).softmax(-1),
            "hidden row": lambda: (s * 0.5).masked_fill(at > 4, float("-inf")).softmax(-1),
            "hidden later": lambda: (s * 0.5).masked_fill(~seen, float("-inf")).softmax(-1),
            "soft causal": lambda: (
                s * 0.5 + torch.where(seen, zero, torch.finfo(s.dtype).min).clamp(min=-1.0)
            ).softmax(-1),
            "over queries": lambda: (s * 0.5 + self.mask).softmax(-2),
            "scores read": lambda: (s * 0.5 + self.mask).softmax(-1) + s.mean(),
            "sigmoid": lambda: (s * 0.5 + self.mask).sigmoid(),
        }
        return forms[self.form]()

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, -1))
        y = torch.matmul(self.probabilities(q, k), v)
        return y.transpose(1, 2).contiguous().view(b, n, 16).square().sum()


def batch() -> tuple[Tensor]:
    return (torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0)).double(),)


def calls(step: StepGraph) -> list[Any]:
    nodes = step.forward.graph.graph.nodes
    return [n for n in nodes if n.target is aten.scaled_dot_product_attention.default]


FOUND = (
    "transformers", "divided", "divided, no mask", "mask first", "T5", "learned bias",
    "q is scaled", "nanoGPT", "added causal", "added window", "one row", "hidden row",
    "hidden later", "soft causal",
)  # fmt: skip


@pytest.mark.parametrize("form", FOUND)
def test_a_spelling_is_found_and_equal(form: str) -> None:
    torch.manual_seed(1)
    model = Attention(form).double()
    step = step_of(model, *batch())
    rewritten = fused(step, "attention")
    (call,) = calls(rewritten)
    assert (call.args[-1] is True) == (form in ("added causal", "hidden later"))
    assert placed_fusions(step, Plan(1, fusions=("attention",))) == {"attention": 1}
    assert rewritten.sizes == step.sizes, "sizes stay symbolic"
    same(step, rewritten, model, batch())
    copies = [n for n in rewritten.forward.graph.graph.nodes if n.target is aten.clone.default]
    assert not any("fuse" in n.meta["made_by"] for n in copies if "made_by" in n.meta)


@pytest.mark.parametrize("form", ["over queries", "scores read", "sigmoid"])
def test_what_is_no_attention_is_left_alone(form: str) -> None:
    step = step_of(Attention(form).double(), *batch())
    finder, sites = find_sites(step, (fusion_named("attention"),))
    assert not sites
    assert finder.near["attention"].reason


def test_a_layout_that_something_sees_is_kept() -> None:
    class Shown(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.view(3, 6, 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, -1))
            y = torch.matmul(self.probabilities(q, k), v)
            return y.square().sum() + torch.as_strided(y, (2,), (1,)).sum()

    model = Shown("divided").double()
    step = step_of(model, *batch())
    (call,) = calls(rewritten := fused(step, "attention"))
    (copy,) = call.users
    assert copy.target is aten.clone.default
    assert copy.meta["val"].is_contiguous()
    assert [
        n.meta["val"].stride() for n in rewritten.forward.graph.graph.output_node().all_input_nodes
    ] == [n.meta["val"].stride() for n in step.forward.graph.graph.output_node().all_input_nodes]


@pytest.mark.parametrize("form", ["transformers", "added causal", "divided"])
def test_under_autocast_it_is_no_worse_than_eager(form: str) -> None:
    torch.manual_seed(2)
    model = Attention(form)
    x = batch()[0].float()
    step = lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST))
    rewritten = fused(step, "attention")
    assert len(calls(rewritten)) == 1
    eager, ours = (gradients(s, model, (x,)) for s in (step, rewritten))
    wide = Attention(form).double()
    wide.load_state_dict(model.state_dict())
    true = gradients(step_of(wide, x.double()), wide, (x.double(),))
    for a, b, t in zip(eager, ours, true, strict=True):
        unit = torch.finfo(torch.bfloat16).eps * t.abs().max()
        assert (b.double() - t).abs().max() <= 2 * (a.double() - t).abs().max() + unit


def test_a_learned_mask_is_not_for_16_bits() -> None:
    step = lower_precision(
        step_of(Attention("learned bias"), batch()[0].float()), Plan(1, precision=AUTOCAST)
    )
    finder, sites = find_sites(step, (fusion_named("attention"),))
    assert not sites
    assert finder.near["attention"].reason == "`mask` needs a gradient, which is not for 16 bits"


def test_a_mask_in_fewer_bits_is_widened() -> None:
    class Narrow(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.view(3, 6, 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, -1))
            s = torch.matmul(q, k.transpose(2, 3)) + self.mask.half()
            return torch.matmul(s.softmax(-1), v).square().sum()

    model = Narrow("divided")
    x = batch()[0].float()
    step = step_of(model, x)
    rewritten = fused(step, "attention")
    assert len(calls(rewritten)) == 1
    for a, b in zip(gradients(step, model, (x,)), gradients(rewritten, model, (x,)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cast_first", [True, False])
def test_dropout_goes_along_where_it_is_asked_for(cast_first: bool) -> None:
    """On a CPU with the mask that eager draws for the same seed."""

    class Dropped(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.view(3, 6, 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, -1))
            p = self.probabilities(q, k)
            p = nn.functional.dropout(p.type(v.dtype) if cast_first else p, 0.25)
            return torch.matmul(p, v).square().sum()

    torch.manual_seed(5)
    model = Dropped("transformers").double()
    step = step_of(model, *batch())
    assert not calls(fused(step, "attention"))
    rewritten = fused(step, "attention", "dropout_attention")
    (call,) = calls(rewritten)
    assert call.args[4] == 0.25
    found = []
    for each in (step, rewritten):
        torch.manual_seed(6)
        found.append(gradients(each, model, batch()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
