"""Losses that are no sum over the batch: what runs once on all of it, and that it is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import graphaccel
from graphaccel import errors
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.programs import build
from graphaccel.ir.program import StageProgram, Value
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.execution.parts import Parts, part_of
from tests.support.mixing import LOSSES, Loss, Model, batch


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_equal_eager(name: str) -> None:
    check(LOSSES[name], microbatches=2 if name == "rmse" else 4)


MIXING: dict[str, Loss] = {
    "roll": lambda m, h, y: (h - h.roll(1, 0)).square().sum(),
    "sort": lambda m, h, y: h.sort(0).values[0].sum() + h.square().mean(),
    "cumsum": lambda m, h, y: h.cumsum(0).square().sum(),
    "maximum": lambda m, h, y: h.max() * h.square().mean(),
    "numbered": lambda m, h, y: (h * torch.arange(h.shape[0])[:, None]).sum(),
    "identity": lambda m, h, y: (h * torch.eye(h.shape[0])[:, :1]).sum(),
    "transposed": lambda m, h, y: (h.T.reshape(-1).cumsum(0) * y.reshape(-1)).square().mean(),
    "labels": lambda m, h, y: (h * (y - y.max(0).values)).square().mean(),
    "both": lambda m, h, y: h.square().mean() + 3 * ((h - y).square().mean() + 1).log(),
    "twice": lambda m, h, y: ((h - h.mean(0)) / h.var(0, correction=0).sqrt()).square().amax(),
}


@pytest.mark.parametrize("name", MIXING)
def test_any_op_may_mix_examples(name: str) -> None:
    check(MIXING[name], microbatches=4)


def check(loss: Loss, microbatches: int) -> None:
    """Loss and gradients are eager's."""
    torch.manual_seed(0)
    plain = Model(loss)
    planned = graphaccel.optimize(copy.deepcopy(plain), devices=1, microbatches=microbatches)
    x, y = batch()
    losses = [plain(x, y), planned(x, y)]
    for each in losses:
        each.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12)


def stage_of(loss: Loss, microbatches: int = 4) -> StageProgram:
    step = capture(Model(loss), flatten_call(batch(), {}))
    plan = Plan(1, batch=8, microbatches=microbatches, schedule="gpipe")
    return build(step, plan).stages[-1]


def calls(graph: GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def test_the_head_is_what_is_no_sum() -> None:
    stage = stage_of(LOSSES["rmse"])
    assert stage.head is not None
    assert calls(stage.head) == [
        "aten.sqrt.default", "aten.ones_like.default", "aten.mul.Scalar", "aten.div.Tensor"
    ]  # fmt: skip
    assert [v.kind for v in stage.head_inputs] == ["summed"]
    assert [v.kind for v in stage.head_outputs] == ["loss", "headed"]
    kinds = [v.kind for v in stage.forward_outputs]
    assert kinds.count("summed") == 1
    assert "loss" not in kinds


def test_features_are_joined_and_their_gradients_sliced() -> None:
    stage = stage_of(LOSSES["clip"])
    assert stage.head is not None
    assert [v.kind for v in stage.head_inputs].count("joined") == 2
    scores = next(n for n in stage.head.graph.nodes if n.target is torch.ops.aten.mm.default)
    assert scores.meta["val"].shape == (8, 8)
    sliced = [v for v in stage.backward_inputs if v.kind == "headed" and v.batch_dim >= 0]
    assert len(sliced) == 2


def test_a_plain_sum_has_no_head() -> None:
    assert stage_of(LOSSES["uncertainty"]).head is None


def test_a_schedule_that_starts_backwards_early_is_refused() -> None:
    model = Model(LOSSES["rmse"])
    with pytest.raises(errors.ScheduleRefused) as caught:
        graphaccel.plan(model, batch(), devices=1, microbatches=2, schedule="1f1b")
    assert caught.value.op == "aten.sqrt.default"
    assert str(caught.value.location).endswith(f":{Model.forward.__code__.co_firstlineno + 1}")
    step = capture(model, flatten_call(batch(), {}))
    with pytest.raises(errors.ScheduleRefused):
        build(step, Plan(1, batch=8, microbatches=2, schedule="1f1b"))


def test_random_numbers_that_head_and_parts_share_are_refused() -> None:
    def noisy(model: Model, h: Tensor, y: Tensor) -> Tensor:
        scale = nn.functional.dropout(model.variances, 0.5).sum()
        return (h * scale).square().mean().sqrt() * scale.exp()

    with pytest.raises(errors.SplitRefused, match="drawn anew for every part"):
        graphaccel.plan(Model(noisy), batch(), devices=1, microbatches=2)


@pytest.mark.parametrize("outer", [1, 3])
def test_parts_of_a_joined_value_are_those_given(outer: int) -> None:
    value = Value("joined", "x", batch_dim=1, outer=outer)
    given = [torch.randn(2, outer * 2, 3) for _ in range(4)]
    parts = Parts(4)
    for each in given:
        parts.take(value, each)
    whole = parts.whole(value, 1, None)
    assert whole.shape == (2, outer * 8, 3)
    assert all(torch.equal(part_of(whole, value, i, 4), each) for i, each in enumerate(given))
    assert not parts.given
