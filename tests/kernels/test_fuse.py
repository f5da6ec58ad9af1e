"""Fusions are found where they are, refused where they are not, and change no gradient."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphaccel import errors
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.layers.blocks import find_blocks
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.capture.symbols import SEQUENCE
from graphaccel.compiler.programs import build
from graphaccel.kernels.register import fusion_of, is_backward
from graphaccel.kernels.registry import fusion_named, shipped
from graphaccel.passes.fusion.fuse import find_sites, fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.profile.cost import step_flops

NORMS = ("add_rms_norm", "rms_norm")
WATCHED = ("gelu_tanh", "cross_entropy", "linear_cross_entropy")
AUTOCAST = Precision(compute="bfloat16")


def step_of(model: nn.Module, *batch: Any) -> StepGraph:
    return capture(model, flatten_call(*as_call(batch)))


def counted(step: StepGraph) -> Counter[str]:
    """Fused forward ops in the joint graph."""
    targets = [n.target for n in step.graph.graph.nodes if n.op == "call_function"]
    return Counter(
        f.name for t in targets if (f := fusion_of(t)) is not None and not is_backward(t)
    )


def fused(step: StepGraph, *names: str) -> StepGraph:
    return fuse(step, Plan(1, fusions=names or tuple(f.name for f in shipped())))


def gradients(step: StepGraph, model: nn.Module, batch: tuple[Any, ...]) -> list[Tensor]:
    """What the joint graph gives for the model's own weights."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held |= step.forward.constants
    values = [batch[i.leaf] if i.kind == "batch" else held[i.name].detach() for i in step.inputs]
    return [v for v in step.graph(*values) if isinstance(v, Tensor)]


def same(step: StepGraph, other: StepGraph, model: nn.Module, batch: tuple[Any, ...]) -> None:
    for a, b in zip(gradients(step, model, batch), gradients(other, model, batch), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


class Norm(nn.Module):
    """One spelling of an RMS norm, and what is made of it."""

    def __init__(self, spelling: str, width: int = 16) -> None:
        super().__init__()
        self.spelling = spelling
        self.first = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def norm(self, x: Tensor) -> Tensor:
        spelled = {
            "weight first": lambda: (
                self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
            ),
            "weight last": lambda: (
                (torch.rsqrt(1e-5 + x.pow(2).mean(-1, keepdim=True)) * x) * self.weight
            ),
            "positive dim": lambda: (
                self.weight * (x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-5))
            ),
            "times itself": lambda: (
                self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5))
            ),
            "torch's": lambda: nn.functional.rms_norm(x, [16], self.weight, 1e-5),
            "another dim": lambda: (
                self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))
            ),
            "no root": lambda: self.weight * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5)),
            "inner value read": lambda: self.inner(x),
        }
        return spelled[self.spelling]()

    def inner(self, x: Tensor) -> Tensor:
        factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (x * factor) + factor

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).square().sum()


def batch(rows: int = 4) -> tuple[Tensor]:
    return (torch.randn(rows, 6, 16, generator=torch.Generator().manual_seed(0)).double(),)


@pytest.mark.parametrize(
    "spelling", ["weight first", "weight last", "positive dim", "times itself", "torch's"]
)
def test_spellings_of_a_norm_are_found_and_equal(spelling: str) -> None:
    model = Norm(spelling).double()
    step = step_of(model, *batch())
    rewritten = fused(step)
    assert counted(rewritten) == {"rms_norm": 1}
    assert rewritten.sizes == step.sizes, "sizes stay symbolic"
    same(step, rewritten, model, batch())


@pytest.mark.parametrize("spelling", ["another dim", "no root", "inner value read"])
def test_what_is_no_norm_is_left_alone(spelling: str) -> None:
    step = step_of(Norm(spelling).double(), *batch())
    assert not counted(fused(step))


def test_the_best_partial_match_says_where_it_stopped() -> None:
    step = step_of(Norm("inner value read").double(), *batch())
    finder, sites = find_sites(step, (fusion_named("rms_norm"),))
    assert not sites
    near = finder.near["rms_norm"]
    assert (near.matched, near.size) == (6, 6)
    assert "reads this value, which the fused op would not give" in near.reason


class Residual(nn.Module):
    """Two norms after sums; `frozen`: their weights get no gradient."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Norm("weight first") for _ in range(2))
        for layer in self.layers:
            layer.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.first(layer.norm(x)) + x
        return self.layers[0].norm(x).square().sum()


class Block(nn.Module):
    """A norm, a sum, a norm behind it, and a sum, which is what the next block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Norm("weight first"), Norm("weight first")

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = layer.first(layer.norm(x)) + x
        return x


class Blocks(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_sums_before_norms_are_taken_along(frozen: bool) -> None:
    model = Residual(frozen).double()
    step = step_of(model, *batch())
    rewritten = fused(step)
    assert counted(rewritten) == {"rms_norm": 1, "add_rms_norm": 2}
    same(step, rewritten, model, batch())


def test_a_sum_that_goes_to_the_next_block_stays_alone() -> None:
    """All blocks are alike, and one tensor goes from each to the next: what is kept of a block that
    is computed again, and sent where a stage ends."""
    model = Blocks().double()
    step = step_of(model, *batch())
    rewritten = fused(step)
    assert counted(rewritten) == {"rms_norm": 3, "add_rms_norm": 3}
    assert len({block.kind for block in find_blocks(rewritten.graph)}) == 1
    same(step, rewritten, model, batch())
    finder, _ = find_sites(step, tuple(fusion_named(n) for n in NORMS))
    assert finder.near["add_rms_norm"].reason == "it would lie across the end of a block"


class Dropped(nn.Module):
    """Dropout, sum and norm, as in GPT-2 and T5; `norm`: which."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.inner, self.dropout = Norm("weight first"), nn.Dropout(0.25)
        self.norm = nn.LayerNorm(16) if norm == "layer" else self.inner.norm

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.inner.first(x))
        return self.norm(x).square().sum() + x.cos().sum()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_dropout_is_taken_along_with_the_mask_of_eager(norm: str) -> None:
    model = Dropped(norm).double()
    step = step_of(model, *batch())
    rewritten = fused(step)
    assert counted(rewritten) == {f"dropout_add_{norm}_norm": 1}
    found = []
    for graph in (step, rewritten):
        torch.manual_seed(3)
        found.append(gradients(graph, model, batch()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


class Head(nn.Module):
    """A head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.first(x)).view(-1, 64)
        return nn.functional.cross_entropy(scores, labels.view(-1))


def test_the_fused_head_counts_as_many_flops() -> None:
    step = step_of(Head(), torch.randn(4, 6, 16), torch.zeros(4, 6, dtype=torch.int64))
    rewritten = fused(step, "linear_cross_entropy")
    assert counted(rewritten) == {"linear_cross_entropy": 1}
    assert step_flops(rewritten.graph.graph) == step_flops(step.graph.graph)


def test_fuel_places_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(Residual().double(), *batch())
    monkeypatch.setenv("GRAPHACCEL_FUEL", "1")
    assert counted(fused(step)) == {"rms_norm": 1}
    monkeypatch.setenv("GRAPHACCEL_FUEL", "0")
    assert not counted(fused(step))


@pytest.mark.parametrize("fuel", ["many", "-1", "", "1.5"])
def test_fuel_that_is_no_number_of_fusions(fuel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 is not "all but the last", as a slice would have it."""
    step = step_of(Residual().double(), *batch())
    sites = sum(counted(fused(step)).values())
    monkeypatch.setenv("GRAPHACCEL_FUEL", fuel)
    with pytest.raises(errors.BadFuel) as caught:
        fused(step)
    assert (caught.value.value, caught.value.sites) == (fuel, sites)


def test_fusing_twice_changes_nothing() -> None:
    once = fused(step_of(Residual().double(), *batch()))
    assert fused(once).text() == once.text()


def test_off_is_off() -> None:
    step = step_of(Residual().double(), *batch())
    assert fuse(step, Plan(1)) is step


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_norms_of_transformers(name: str, low: torch.dtype | None) -> None:
    from tests.support.zoo import ZOO

    model, given, _ = ZOO[name].build()
    if low is not None:
        model = model.to(low)
    step = capture(model, flatten_call(*as_call(given)))
    found = counted(fused(step, *NORMS))
    assert (
        found
        == {"llama": {"rms_norm": 5, "add_rms_norm": 4}, "t5": {"rms_norm": 8, "add_rms_norm": 9}}[
            name
        ]
    )


class Spelled(nn.Module):
    """A GELU spelled out, and a head whose loss is in the model's dtype. constant: of the GELU."""

    def __init__(self, constant: float = math.sqrt(2.0 / math.pi), smoothing: float = 0.0) -> None:
        super().__init__()
        self.constant, self.smoothing = constant, smoothing
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 96)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        inner = self.constant * (x + 0.044715 * torch.pow(x, 3.0))
        scores = self.head(0.5 * x * (1.0 + torch.tanh(inner))).view(-1, 96)
        return nn.functional.cross_entropy(scores, labels.view(-1), label_smoothing=self.smoothing)


@pytest.mark.parametrize("form", ["autocast", "bf16"])
def test_in_16_bits_they_are_no_worse_than_eager(form: str) -> None:
    torch.manual_seed(2)
    model = Spelled()
    low = model.bfloat16() if form == "bf16" else model
    x = torch.randn(4, 6, 16).to(next(low.parameters()).dtype)
    given = (x, torch.randint(96, (4, 6)))
    step = step_of(low, *given)
    step = lower_precision(step, Plan(1, precision=AUTOCAST if form == "autocast" else Precision()))
    rewritten = fused(step, "gelu_tanh", "linear_cross_entropy")
    assert counted(rewritten) == {"linear_cross_entropy": 1}
    assert "aten.gelu" in rewritten.text()
    eager, ours = (gradients(s, low, given) for s in (step, rewritten))
    assert [v.dtype for v in ours] == [v.dtype for v in eager]
    wide = copy.deepcopy(low).double()
    true = gradients(step_of(wide, x.double(), given[1]), wide, (x.double(), given[1]))
    assert len(true) == len(ours) == len(eager)
    for a, b, t in zip(eager, ours, true, strict=True):
        unit = torch.finfo(torch.bfloat16).eps * t.abs().max()
        worst = 2 * (a.double() - t).abs().max() + unit
        assert (b.double() - t).abs().max() <= worst


@pytest.mark.parametrize("form", ["autocast", "bf16"])
def test_look_alikes_in_16_bits_are_left_alone(form: str) -> None:
    model = Spelled(constant=0.8, smoothing=0.1)
    low = model.bfloat16() if form == "bf16" else model
    step = step_of(low, torch.zeros(2, 3, 16).to(low.head.weight.dtype), torch.zeros(2, 3).long())
    step = lower_precision(step, Plan(1, precision=AUTOCAST if form == "autocast" else Precision()))
    assert not find_sites(step, tuple(f for f in shipped() if f.name in WATCHED))[1]


class Scaled(nn.Module):
    """Words multiplied by a float that goes with their number; kind: how. [b, s] -> a number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.words = kind, nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        n, x = ids.shape[1], self.words(ids)
        factor = {
            "inverse": 1.0 / n, "root": n**0.5, "inverse root": n**-0.5, "times": 0.1 * n,
            "logarithm": math.log(n), "affine": 0.5 * n + 1.0,
        }[self.kind]  # fmt: skip
        return (x * factor).square().sum()


def words(length: int) -> Tensor:
    return torch.arange(4 * length).reshape(4, length) % 10


@pytest.mark.parametrize(
    ("kind", "known"),
    [("inverse", True), ("root", True), ("inverse root", True), ("times", True),
     ("logarithm", False), ("affine", False)],
)  # fmt: skip
def test_a_float_that_goes_with_a_size_is_right_at_any(kind: str, known: bool) -> None:
    """Or the size is fixed: two captures do not say what a logarithm is."""
    model = Scaled(kind).double()
    step = step_of(model, words(8))
    assert (SEQUENCE in step.sizes) == known
    if not known:
        return
    program = build(step, Plan(1), sizes={**step.sizes, SEQUENCE: 32})
    plain = model.words(words(32)).square().sum().item()
    factors = [f for n in program.stages[0].forward.graph.nodes if (f := _factor(n)) is not None]
    assert factors[0] ** 2 == pytest.approx(model(words(32)).item() / plain, rel=1e-12)


def _factor(node: torch.fx.Node) -> float | None:
    multiplies = node.target is torch.ops.aten.mul.Tensor
    return node.args[1] if multiplies and isinstance(node.args[1], float) else None


def test_a_divisor_that_goes_with_a_size_is_no_constant_of_a_fused_op() -> None:
    class Heads(Scaled):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)[:, None]
            y = (x @ x.transpose(2, 3) / ids.shape[1]).softmax(-1) @ x
            return y.square().sum()

    step = step_of(Heads("").double(), words(8))
    assert SEQUENCE in step.sizes
    assert find_sites(step, (fusion_named("attention"),))[1]
    assert fused(step, "attention") is step
