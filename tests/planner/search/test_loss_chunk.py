"""How many tokens a fused head and loss does at a time: what it takes, when it is chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import graphaccel
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.programs import build
from graphaccel.errors import BadPin
from graphaccel.passes.fusion.fuse import fuse
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.branch_and_bound import seconds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import shapes
from graphaccel.planner.search.solve import Problem, with_cuts_and_blocks
from tests.support.captures import captures_of
from tests.support.zoo import ZOO, call, double, loss_of

pytestmark = pytest.mark.usefixtures("shared_captures")

MadeUp = Callable[..., Cluster]
HEAD = ("linear_cross_entropy",)
WORDS, LENGTH, BATCH = 2048, 64, 8  # 512 tokens


def example() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        use_cache=False, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=32, vocab_size=WORDS,
    )  # fmt: skip
    ids = torch.randint(0, WORDS, (BATCH, LENGTH))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def step() -> StepGraph:
    model, batch = example()
    compiler = Compiler(Model(model, None, 8), cluster("cpu", 1), {})
    with captures_of(__name__):
        return compiler.capture(as_batch(batch))[0]


@pytest.fixture(scope="module")
def fused(step: StepGraph) -> Profile:
    return Profile(fuse(step, plan_of()))


def plan_of(**decided: Any) -> Plan:
    return Plan(1, batch=BATCH, fusions=HEAD).decided(**decided)


def problem_of(fused: Profile, where: Cluster) -> Problem:
    """On devices whose products take no time but that of what they move."""
    where = replace(where, device=replace(where.device, peak_flops={"float32": 1e15}))
    return Problem(Layouts(fused), where, 8, Limits())


def test_the_call_is_told(step: StepGraph) -> None:
    def told(plan: Plan) -> list[object]:
        (stage,) = build(step, plan).stages
        return [n.args[-1] for n in stage.forward.graph.nodes if "linear_cross" in str(n.target)]

    assert told(plan_of()) == [0]
    assert told(plan_of(loss_chunk=128)) == [128]


def test_time_and_memory_go_against_each_other(fused: Profile, made_up: MadeUp) -> None:
    """Each chunk more reads and adds up the weight again; the logits of each are float32."""
    problem = problem_of(fused, made_up(1))
    sizes = problem.sized(plan_of()).chunks
    assert sizes[-1] == 128
    assert all(size < BATCH * LENGTH for size in sizes)
    found = {n: problem.predicted(plan_of(loss_chunk=n), simulated=False) for n in (128, 256)}
    time = {n: seconds(plan) for n, plan in found.items()}
    profile = problem.profile
    weight = WORDS * 64 * 4  # read for logits and for dx, written for its gradient, which is summed
    again = 2 * 5 * weight / 1e9 + 2 * (3 + 10) * 1e-6
    assert time[128] - time[256] == pytest.approx(again, rel=1e-6)
    less, more = (
        profile.sized(BATCH, problem.cluster.device, None, n).passing_forward for n in (128, 256)
    )
    assert sorted(set((more - less).tolist())) == [0, 128 * WORDS * 4]


def test_what_is_predicted_is_what_is_counted(
    step: StepGraph, fused: Profile, made_up: MadeUp
) -> None:
    """The closed form and the programs grow by the same bytes where the head holds the peak."""
    model, batch = example()
    where, found = made_up(1, 1 << 20), []
    for size in (128, 256):
        plan = plan_of(loss_chunk=size, pinned=("loss_chunk",))
        plan = with_cuts_and_blocks(problem_of(fused, where), plan, "none", None)
        compiler = Compiler(Model(model, None, 8), where, {"fusions": HEAD})
        exact, _ = compiler.refine(step, plan, as_batch(batch), step.sizes)
        assert plan.prediction is not None
        assert exact.prediction is not None
        found.append((plan.prediction.memory[0].tensors, exact.prediction.memory[0].tensors))
    assert found[1][0] - found[0][0] == found[1][1] - found[0][1] == 128 * WORDS * 4


@pytest.mark.parametrize("recompute", ["none", "some", "all"])
def test_the_fastest_that_fits_is_chosen(recompute: str, fused: Profile, made_up: MadeUp) -> None:
    """Equal to trying every number that may be asked for, at every budget."""
    free = problem_of(fused, made_up(1))
    sizes = free.sized(plan_of()).chunks
    peaks = []
    for size in sizes:
        plan = plan_of(loss_chunk=size, pinned=("loss_chunk",))
        for choice in (recompute, "all"):
            solved = with_cuts_and_blocks(free, plan, choice, None)
            assert solved.prediction is not None
            peaks.append(solved.prediction.memory[0].peak)
    chosen = set()
    for kib in sorted({peak // 1024 + more for peak in peaks for more in (-40, -1, 1, 4096)}):
        problem = problem_of(fused, made_up(1, kib))
        found = with_cuts_and_blocks(problem, plan_of(), recompute, None)
        each = [
            with_cuts_and_blocks(
                problem, plan_of(loss_chunk=n, pinned=("loss_chunk",)), recompute, None
            )
            for n in sizes
        ]
        fitting = [p for p in each if p.prediction.memory[0].peak <= kib << 10]  # type: ignore[union-attr]
        chosen.add(found.loss_chunk)
        if fitting:
            assert seconds(found) == min(map(seconds, fitting))
        else:
            least = min(p.prediction.memory[0].peak for p in each)  # type: ignore[union-attr]
            assert found.prediction is not None
            assert found.prediction.memory[0].peak == least
    assert len(chosen) > 1


def test_no_bound_is_above_a_plan(fused: Profile, made_up: MadeUp) -> None:
    plan, problem = replace(plan_of(), devices=4), problem_of(fused, made_up(4, 1 << 20))
    pins = Pins(recompute="none", tensor=1, context=1, expert=1)
    found = list(shapes(problem, pins, BATCH))
    least = Bounds(problem, plan).seconds(columns(found, BATCH))
    seen = set()
    for shape, bound in zip(found, least.tolist(), strict=True):
        if shape.pipeline * shape.interleave > 4:
            continue
        solved = with_cuts_and_blocks(problem, shape.on(plan), "none", None)
        seen.add(solved.loss_chunk)
        assert bound <= seconds(solved) * (1 + 1e-9), shape
    assert len(seen) > 1  # microbatches of few tokens are done at once


def test_a_search_and_its_report(made_up: MadeUp) -> None:
    model, batch = example()
    pins: dict[str, Any] = {"fusions": HEAD, "recompute": "none", "microbatches": 1}
    plan = graphaccel.plan(model, batch, devices=1, device="cpu", **pins)
    assert 128 <= plan.loss_chunk < BATCH * LENGTH
    (said,) = [n for n in plan.notes if n.startswith("head and loss")]
    assert said.startswith(f"head and loss: {plan.loss_chunk} of 512 tokens at a time take ")
    again = graphaccel.plan(model, batch, devices=1, device="cpu", loss_chunk=512, **pins)
    assert again.loss_chunk == 512
    assert "head and loss: all 512 tokens at once" in again.notes
    assert "loss_chunk" in again.pinned
    assert Plan.from_json(again.to_json()) == again


def test_losses_and_gradients_are_those_of_eager() -> None:
    """In float64, whatever is done at a time."""
    model, batch, _ = ZOO["gpt"].build()
    model, batch = double(model, batch)
    loss = loss_of(call(model, batch), batch)
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for size in (7, 32, 4096):
        model.zero_grad()
        fast = copy.deepcopy(model)
        graphaccel.optimize(
            fast, devices=1, fusions=HEAD, loss_chunk=size, microbatches=2, example_batch=batch
        )
        made = loss_of(call(fast, batch), batch)
        made.backward()
        torch.testing.assert_close(made, loss, rtol=1e-12, atol=0)
        for name, parameter in fast.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ({"loss_chunk": 0, "fusions": HEAD}, "it is a count of at least 1"),
        ({"loss_chunk": 64}, "the graph has no fused head and loss, which fusions= asks for"),
        (
            {"loss_chunk": 64, "fusions": ("rms_norm",)},
            "the graph has no fused head and loss: graphaccel explain says why",
        ),
    ],
)
def test_pins_that_can_not_be(pins: dict[str, Any], reason: str) -> None:
    model, batch = example()
    with pytest.raises(BadPin) as caught:
        graphaccel.plan(model, batch, devices=1, device="cpu", **pins)
    assert caught.value.reason == reason
