"""Softmax and dropout as one op, where attention as a whole stays spelled out: found by name alone,
equal to eager with what eager keeps, and nowhere that nothing is dropped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.kernels.register import op_of
from graphaccel.kernels.registry import enabled, fusion_named, without_tensor_axis
from graphaccel.passes.fusion.fuse import find_sites, fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.plan import Plan
from tests.kernels.test_fuse import AUTOCAST, counted, fused, step_of
from tests.support.zoo import ALL

NAME = "scale_mask_softmax_dropout"
BY_NAME = (NAME, "attention", "dropout_attention", "scale_mask_softmax")


class Attention(nn.Module):
    """Attention [b, s, 16] -> a loss and its weights; `form`: who reads those, or what else makes
    it no attention of torch's; `p`: how much is dropped."""

    def __init__(self, form: str, p: float = 0.25) -> None:
        super().__init__()
        self.form, self.dropout = form, nn.Dropout(p)
        self.qkv, self.more = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(1, 1, 6, 6))
        self.register_buffer("mask", torch.randn(1, 1, 6, 6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, -1))
        if self.form == "one head":
            q, k, v = self.qkv(x).split(16, -1)
        s = torch.matmul(q, k.transpose(-1, -2))
        if self.form == "dropped first":
            s = self.dropout(s * 0.5 + self.mask)
        soft = {
            "no mask": lambda: (s / 3).softmax(-1),
            "no scale": lambda: (self.mask + s).softmax(-1),
            "neither": lambda: s.softmax(-1),
            "cast": lambda: torch.softmax(s * 0.5 + self.mask, -1, dtype=torch.float32).to(v.dtype),
            "one head": lambda: (s * 0.5 + self.mask[0]).softmax(-1),
            "learned mask": lambda: (s * 0.5 + self.bias).softmax(-1),
            "over queries": lambda: (s * 0.5 + self.mask).softmax(-2),
            "dropped first": lambda: s.softmax(-1),
        }.get(self.form, lambda: (s * 0.5 + self.mask).softmax(-1))()
        w = soft if self.form == "dropped first" else self.dropout(soft)
        if self.form == "other dropped":
            w = soft * self.dropout(s)
        y = torch.matmul(w, v)
        loss = y.square().sum()
        if self.form == "one head":
            return {"loss": loss}
        if self.form == "used twice":
            other = self.more(x).view(b, n, 4, 4).transpose(1, 2)
            loss = loss + torch.matmul(w, other).cos().sum()
        if self.form == "read before":
            loss = loss + soft.square().sum()
        return {"loss": loss, "weights": w}


def batch() -> Tensor:
    return torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0)).double()


def made(step: StepGraph, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the joint graph gives: the loss, the weights of attention, gradients by name."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held |= step.forward.constants
    torch.manual_seed(6)
    values = [x if i.kind == "batch" else held[i.name].detach() for i in step.inputs]
    found = zip(step.outputs, step.graph(*values), strict=True)
    return {o.name or o.kind: v for o, v in found if isinstance(v, Tensor)}


def by_eager(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(6)
    given = model(x)
    given["loss"].backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": given["loss"], "output": given.get("weights")}


def keeping(step: StepGraph, *names: str) -> StepGraph:
    return fuse(step, Plan(1, fusions=names, outputs="all"))


def calls(step: StepGraph) -> list[fx.Node]:
    return [n for n in step.graph.graph.nodes if n.target is op_of(fusion_named(NAME))]


FOUND = (
    "returned", "used twice", "one head", "no mask", "no scale", "neither",
    "learned mask",
)  # fmt: skip


@pytest.mark.parametrize("form", FOUND)
def test_it_is_found_and_equal_to_eager_with_what_that_keeps(form: str) -> None:
    torch.manual_seed(1)
    model, x = Attention(form).double(), batch()
    step = step_of(model, x)
    rewritten = keeping(step, *BY_NAME)
    assert counted(rewritten) == {NAME: 1}
    assert rewritten.sizes == step.sizes, "sizes stay symbolic"
    got, right = made(rewritten, model, x), by_eager(model, x)
    assert len(got) >= 3
    for name, value in got.items():
        torch.testing.assert_close(value, right[name], rtol=1e-10, atol=1e-12)
    if form != "one head":
        assert (got["output"] == 0).any(), "something is dropped"


def test_no_mask_is_kept_for_the_backward() -> None:
    (call,) = calls(keeping(step_of(Attention("returned").double(), batch()), NAME))
    assert [v.dtype for v in call.meta["val"]] == [torch.float64] * 2


def test_auto_leaves_it_out() -> None:
    for device in ("cpu", "cuda"):
        assert NAME not in enabled("auto", device)
        step = step_of(Attention("returned").double(), batch())
        assert counted(keeping(step, *enabled("auto", device))) == {"scale_mask_softmax": 1}


def test_a_tensor_axis_keeps_the_heads_apart() -> None:
    """There the parts of a dropout are drawn rank by rank, which a fused op can not."""
    assert without_tensor_axis(BY_NAME) == tuple(n for n in BY_NAME if n != NAME)


def test_where_nothing_else_reads_the_weights_attention_goes_first() -> None:
    rewritten = fused(step_of(Attention("returned").double(), batch()), *BY_NAME)
    assert not counted(rewritten)
    nodes = rewritten.forward.graph.graph.nodes
    assert torch.ops.aten.scaled_dot_product_attention.default in [n.target for n in nodes]


@pytest.mark.parametrize("how", ["p = 0", "eval"])
def test_nothing_is_dropped_nothing_is_found(how: str) -> None:
    model = Attention("returned", 0.0 if how == "p = 0" else 0.25).double()
    step = step_of(model.train(how == "p = 0"), batch())
    assert counted(keeping(step, *BY_NAME)) == {"scale_mask_softmax": 1}
    finder, sites = find_sites(step, (fusion_named(NAME),), keep_outputs=True)
    assert not sites
    assert finder.near[NAME].reason.endswith("where the pattern has aten.native_dropout")


LEFT = ("over queries", "dropped first", "other dropped", "read before")


@pytest.mark.parametrize("form", LEFT)
def test_what_is_something_else_is_left_alone(form: str) -> None:
    step = step_of(Attention(form).double(), batch())
    finder, sites = find_sites(step, (fusion_named(NAME),), keep_outputs=True)
    assert not sites
    reason = finder.near[NAME].reason
    read = "reads this value, which the fused op would not give"
    assert (read in reason) == (form == "read before"), reason


def test_a_dropout_that_keeps_nothing_is_refused_with_the_reason() -> None:
    step = step_of(Attention("returned", 1.0).double(), batch())
    finder, sites = find_sites(step, (fusion_named(NAME),), keep_outputs=True)
    assert not sites
    assert finder.near[NAME].reason == "a dropout of 1.0 keeps nothing"


@pytest.mark.parametrize("form", ["one head", "cast"])
def test_in_16_bits_it_is_no_worse_than_eager(form: str) -> None:
    """Under autocast, where dropout goes before the cast; and a model in 16 bits that casts first.
    On a CPU the mask does not depend on the dtype."""
    torch.manual_seed(2)
    low = Attention(form).bfloat16()
    wide = Attention(form).double()
    wide.load_state_dict(low.state_dict())
    x = batch().bfloat16()
    if form == "cast":
        model, step = low, step_of(low, x)
    else:
        model, x = copy.deepcopy(wide).float(), x.float()
        step = lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST))
    rewritten = keeping(step, NAME)
    (call,) = calls(rewritten)
    assert call.args[0].meta["val"].dtype == torch.bfloat16, "the scores are read as they are"
    eager, ours = (made(s, model, x) for s in (step, rewritten))
    true = by_eager(wide, x.double())
    assert len(ours) >= 3
    for name, value in ours.items():
        right, theirs = true[name], eager[name].double()
        unit = torch.finfo(torch.bfloat16).eps * right.abs().max()
        assert (value.double() - right).abs().max() <= 2 * (theirs - right).abs().max() + unit


def test_a_model_that_returns_its_attention_has_it_in_every_layer() -> None:
    model, given, loss = ALL["gpt2"].build()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    step = capture(model, flatten_call(*as_call(given)), loss)
    chosen: Any = tuple(fusion_named(n) for n in ("attention", "dropout_attention", NAME))
    _, sites = find_sites(step, chosen, keep_outputs=True)
    assert [s.fusion.name for s in sites] == [NAME] * 4
    assert [s.inputs["p"] for s in sites] == [0.1] * 4
