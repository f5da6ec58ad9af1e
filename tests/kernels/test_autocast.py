"""Under autocast, as `precision="bf16"` has it, fusions are found where they are in float32."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fusions import measured
from benchmarks.shared.common import RESULTS
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.kernels.register import fusion_of, is_backward, wide_form
from graphaccel.kernels.registry import fusion_named
from graphaccel.passes.fusion.fuse import find_sites
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.plan import Plan
from tests.kernels.test_fuse import AUTOCAST, counted, fused, gradients, step_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.release)])
def test_the_committed_table_is_what_is_found(name: str) -> None:
    """benchmarks/results/fusions.json, which docs/fusions.md shows: counts and bytes of a row, with
    what the chunks of the head move."""
    rows = json.loads((RESULTS / "fusions.json").read_text())["rows"]
    what = (name, "sdpa", "autocast")
    (row,) = (r for r in rows if (r["model"], r["attention"], r["form"]) == what)
    assert measured(*what) == row
    assert row["bytes_floor"] < row["bytes_after"] < 0.75 * row["bytes_before"]


class Turned(nn.Module):
    """Two projections turned by tables in float32: `forward(x)`, x [B, S, 16] → scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10 ** torch.arange(8) * 1.0
        angles = torch.cat((angles, angles), -1).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()

        def turn(y: Tensor) -> Tensor:
            return y * cos + torch.cat((-y[..., 8:], y[..., :8]), -1) * sin

        return (turn(self.query(x)) * turn(self.key(x))).sum(-1).tanh().sum()


def test_rotary_by_wide_tables_is_no_worse_than_eager() -> None:
    torch.manual_seed(4)
    model, x = Turned(), torch.randn(3, 5, 16)
    step = lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST))
    rewritten = fused(step, "rotary")
    assert counted(rewritten) == {"rotary": 2}
    no_worse(step, rewritten, model, x)


def no_worse(step: StepGraph, rewritten: StepGraph, model: nn.Module, x: Tensor) -> None:
    """Loss and gradients: at most twice as far from float64 as eager's, and of the same dtypes."""
    eager, ours = gradients(step, model, (x,)), gradients(rewritten, model, (x,))
    assert [v.dtype for v in ours] == [v.dtype for v in eager]
    wide = copy.deepcopy(model).double()
    true = gradients(step_of(wide, x.double()), wide, (x.double(),))
    assert len(true) == len(ours) == len(eager)
    for a, b, t in zip(eager, ours, true, strict=True):
        unit = torch.finfo(torch.bfloat16).eps * t.abs().max()
        assert (b.double() - t).abs().max() <= 2 * (a.double() - t).abs().max() + unit


class Gated(nn.Module):
    """T5's gated activation, spelled out: `forward(x)`, x [B, S, 16] → scalar."""

    def __init__(self, kind: str = "gated") -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down, self.kind = nn.Linear(32, 16, bias=False), kind

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        factor = 0.8 if self.kind == "another factor" else math.sqrt(2.0 / math.pi)
        inner = factor * (gate + 0.044715 * torch.pow(gate, 3.0))
        active = 0.5 * gate * (1.0 + torch.tanh(inner))
        y = active + up if self.kind == "sum" else active * up
        loss = self.down(y).tanh().sum()
        return loss + active.sum() if self.kind == "inner value read" else loss


def _low(kind: str) -> tuple[StepGraph, nn.Module, Tensor]:
    torch.manual_seed(4)
    model, x = Gated(kind), torch.randn(3, 5, 16)
    return lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST)), model, x


def test_what_autocast_computes_in_float32_of_16_bits_is_no_worse_than_eager() -> None:
    """The activation comes out in float32: the op takes 16 bits, keeps them, and gives that."""
    step, model, x = _low("gated")
    _, (site,) = find_sites(step, (fusion_named("geglu_tanh"),))
    (was,) = (n.meta["val"] for n in site.outputs)
    assert (was.dtype, site.wide) == (torch.float32, torch.float32)
    rewritten = fused(step, "geglu_tanh", "gelu_tanh")
    assert counted(rewritten) == {"geglu_tanh": 1}
    calls: dict[bool, Any] = {
        is_backward(n.target): n
        for n in rewritten.graph.graph.nodes
        if n.op == "call_function" and fusion_of(n.target) is not None
    }
    now = calls[False].meta["val"]
    assert (now.dtype, now.shape, now.stride()) == (was.dtype, was.shape, was.stride())
    kept = calls[True].args[1:3]
    assert {n.meta["val"].dtype for n in (*calls[False].args, *kept)} == {torch.bfloat16}
    assert [v.dtype for v in calls[True].meta["val"]] == [torch.bfloat16] * 2
    no_worse(step, rewritten, model, x)


@pytest.mark.parametrize("kind", ["another factor", "sum", "inner value read"])
def test_look_alikes_are_left_alone_under_autocast(kind: str) -> None:
    finder, sites = find_sites(_low(kind)[0], (fusion_named("geglu_tanh"),))
    assert not sites
    assert finder.near["geglu_tanh"].reason


def test_products_have_no_form_in_float32() -> None:
    """Autocast has them in 16 bits."""
    assert wide_form(fusion_named("linear_cross_entropy")) is None
    assert wide_form(fusion_named("gelu_tanh")) is None
    wide = wide_form(fusion_named("geglu_tanh"))
    assert wide is not None
    assert wide.workspace is not None
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert wide.workspace(gate=x, up=x) == 2 * 4 * 15


class Sums(nn.Module):
    """A norm of a sum of two projections, 16 bits under autocast: `forward(x)`, x [B, S, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        total = self.left(x) + self.right(x)
        return (self.norm(total) * total).sum(-1).tanh().sum()


def test_a_norm_of_a_sum_in_16_bits_takes_wide_weights() -> None:
    torch.manual_seed(4)
    model, x = Sums(), torch.randn(3, 5, 16)
    step = lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST))
    rewritten = fused(step, "add_layer_norm")
    assert counted(rewritten) == {"add_layer_norm": 1}
    no_worse(step, rewritten, model, x)


class Biased(nn.Module):
    """A projection and GELU; kind: what is between, or what else reads it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(16, 32, bias=kind != "no bias")
        self.matrix = nn.Parameter(torch.randn(16, 32) / 4)
        if kind == "frozen bias":
            self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "Conv1D":
            flat = torch.addmm(self.up.bias, x.view(-1, 16), self.matrix)
            return nn.functional.gelu(flat.view(*x.shape[:2], 32)).square().sum()
        if self.kind == "scaled":
            flat = torch.addmm(self.up.bias, x.view(-1, 16), self.matrix, beta=2)
            return nn.functional.gelu(flat.view(*x.shape[:2], 32)).square().sum()
        y = self.up(x)
        active = nn.functional.gelu(y)
        loss = active.square().sum()
        return loss + y.sum() if self.kind == "read" else loss


@pytest.mark.parametrize("kind", ["linear", "frozen bias", "Conv1D"])
def test_a_bias_is_taken_out_of_its_product(kind: str) -> None:
    torch.manual_seed(4)
    model, x = Biased(kind).double(), torch.randn(3, 5, 16).double()
    step = step_of(model, x)
    rewritten = fused(step, "bias_gelu")
    assert counted(rewritten) == {"bias_gelu": 1}
    assert rewritten.sizes == step.sizes, "sizes stay symbolic"
    for a, b in zip(gradients(step, model, (x,)), gradients(rewritten, model, (x,)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "Conv1D"])
def test_and_under_autocast_it_is_no_worse_than_eager(kind: str) -> None:
    """Though the product is rounded once more, before the bias."""
    torch.manual_seed(4)
    model, x = Biased(kind), torch.randn(3, 5, 16)
    step = lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST))
    rewritten = fused(step, "bias_gelu")
    assert counted(rewritten) == {"bias_gelu": 1}
    no_worse(step, rewritten, model, x)


@pytest.mark.parametrize("kind", ["no bias", "read", "scaled"])
def test_a_bias_that_is_none_or_read_with_its_product_stays(kind: str) -> None:
    step = step_of(Biased(kind), torch.randn(3, 5, 16))
    finder, sites = find_sites(step, (fusion_named("bias_gelu"),))
    assert not sites
    assert finder.near["bias_gelu"].reason


def test_of_one_vector_too() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(self.up(x), approximate="tanh").square().sum()

    model, x = Vector().double(), torch.randn(16).double()
    step = step_of(model, x)
    rewritten = fused(step, "bias_gelu_tanh")
    assert counted(rewritten) == {"bias_gelu_tanh": 1}
    for a, b in zip(gradients(step, model, (x,)), gradients(rewritten, model, (x,)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
