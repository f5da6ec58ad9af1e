"""The closed form of sharded plans against the programs that run: memory, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.ir.program import StepProgram
from graphaccel.planner.cluster.catalogue import cluster as named_cluster
from graphaccel.planner.cluster.cluster import Cluster, Host
from graphaccel.planner.cluster.communication import all_reduce_seconds
from graphaccel.planner.estimate.stage_costs import stage_costs
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import collective_costs_of
from graphaccel.planner.profile.cost import Sizes, dims_of
from graphaccel.planner.profile.layout_profiles import Layouts, ShardGraph, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.solve import Problem, with_cuts_and_blocks
from tests.support.zoo import ALL

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]
AWAY = ("optimizer", "parameters")


def shard_graph(step: StepGraph, cluster: Cluster) -> ShardGraph:
    return lambda plan: sharded_graph(step, replace(plan, rates=rates_of(cluster, plan)))


def problem_of(step: StepGraph, cluster: Cluster) -> Problem:
    layouts = Layouts(Profile(step), shard_graph(step, cluster))
    return Problem(layouts, cluster, 8, Limits())


@pytest.mark.parametrize(
    ("name", "decided"),
    [
        ("gpt", {"tensor": 2}),
        ("gpt", {"tensor": 2, "pipeline": 2, "microbatches": 4}),
        ("gpt", {"context": 2, "microbatches": 2}),
        ("gpt", {"data": 2, "zero": 1}),
        ("gpt", {"data": 2, "zero": 2}),
        ("gpt", {"data": 2, "zero": 3}),
        ("gpt", {"data": 2, "zero": 3, "tensor": 2, "microbatches": 2}),
        (
            "gpt",
            {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "microbatches": 2},
        ),
        ("gpt", {"microbatches": 2, "offload": AWAY}),
        ("gpt", {"tensor": 2, "offload": AWAY}),
        ("mixtral", {"expert": 2}),
        ("mixtral", {"context": 2}),
    ],
)
def test_memory_is_that_of_the_programs(
    name: str, decided: dict[str, Any], captured: Captured, made_up: MadeUp
) -> None:
    plan = Plan(devices=1, batch=8).decided(**decided)
    cluster = made_up(plan.data * plan.pipeline * plan.model_parallel_size, 1 << 20)
    cluster = replace(cluster, host=Host(1 << 30, 1e9, 1e9))
    step = captured(name)
    plan = with_cuts_and_blocks(problem_of(step, cluster), plan, "none", None)
    assert_as_built(step, plan, cluster, 0.04, name)


def assert_as_built(
    step: StepGraph, plan: Plan, cluster: Cluster, within: float, name: str = "gpt"
) -> None:
    module, batch, loss_fn = ALL[name].build()
    compiler = Compiler(Model(module, loss_fn, 2.0), cluster, {})
    exact, _ = compiler.refine(step, plan, as_batch(batch), step.sizes)
    assert plan.prediction is not None
    assert exact.prediction is not None
    for guess, real in zip(plan.prediction.memory, exact.prediction.memory, strict=True):
        assert guess.tensors == pytest.approx(real.tensors, rel=within)


@pytest.mark.parametrize("recompute", ["none", "selective", "all"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (3, 8), (4, 8), (4, 2)])
def test_memory_is_that_of_the_programs_where_gradients_of_weights_are_apart(
    ranks: int, microbatches: int, recompute: str, captured: Captured, made_up: MadeUp
) -> None:
    """However little waits for the backward, what it recomputes waits for the weights' part."""
    step, cluster = captured("gpt"), made_up(ranks, 1 << 20)
    plan = Plan(ranks, batch=8, pipeline=ranks, microbatches=microbatches)
    plan = replace(plan, schedule="zero_bubble")
    plan = with_cuts_and_blocks(problem_of(step, cluster), plan, recompute, None)
    assert_as_built(step, plan, cluster, 0.05)


def test_a_sharded_step_computes_half_and_sends(captured: Captured, made_up: MadeUp) -> None:
    problem = problem_of(captured("gpt"), made_up(2))
    one, two = Plan(1, batch=8), Plan(2, tensor=2, batch=8)
    whole, half = (problem.predicted(p, simulated=False).prediction for p in (one, two))
    assert whole is not None
    assert half is not None
    work = stage_costs(problem.layouts.of(two), problem.sized(two), two, 1e-6)[0]
    inside = work.sent_forward + work.sent_backward
    sums = {axes: n for axes, n in work.summed.items() if axes}
    assert list(sums) == [("tensor",)]  # biases and norms whose tokens are shared out
    outside = all_reduce_seconds(problem.cluster, sums[("tensor",)], 2)
    assert half.communication == pytest.approx(inside + outside)
    assert 0.5 * whole.compute < half.compute < 0.75 * whole.compute
    assert half.optimizer < 0.75 * whole.optimizer


def test_sizes_grow_as_those_of_the_whole_graph(captured: Captured, made_up: MadeUp) -> None:
    """The layout is sharded for a few examples, and read at other numbers of them."""
    step, cluster = captured("gpt"), made_up(2)
    plan = Plan(2, tensor=2, batch=8)
    local = sharded_graph(step, replace(plan, rates=rates_of(cluster, plan))).step
    few, more = (Sizes({**local.sizes, BATCH: n}) for n in (local.sizes[BATCH], 24))
    whole = {n.name: n for n in step.graph.graph.nodes}
    compared = 0
    for node in local.graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        here = dims_of(node, few)
        assert here == tuple(value.shape)
        if node.name in whole and (before := dims_of(whole[node.name], few)):
            grown, after = dims_of(node, more), dims_of(whole[node.name], more)
            assert math.prod(grown) * math.prod(before) == math.prod(after) * math.prod(here)
            compared += grown != here
    assert compared > 100


def test_axes_lie_on_the_links_they_reach(made_up: MadeUp) -> None:
    plan = Plan(16, tensor=2, context=2, expert=1, data=4)
    collective_costs = collective_costs_of(made_up(16), plan)
    assert collective_costs.group(["tensor"]) == (2, 1, ())
    assert collective_costs.group(["context"]) == (2, 2, ())
    assert collective_costs.group(["data"]) == (4, 4, ())
    assert collective_costs.group(["context", "tensor"]) == (4, 1, ())
    assert collective_costs.group(["data", "tensor"]) == (2, 1, ((4, 4),))
    assert collective_costs.group(["expert"]) == (1, 1, ())
    inner, outer = (
        collective_costs.all_reduce(1e6, ["tensor"]),
        collective_costs.all_reduce(1e6, ["data"]),
    )
    assert inner == all_reduce_seconds(made_up(16), 1e6, 2)
    assert outer == all_reduce_seconds(made_up(16), 1e6, 4, stride=4) > inner


def test_memory_does_not_depend_on_what_was_predicted_before(
    captured: Captured, made_up: MadeUp
) -> None:
    """Profiles keep what plans have in common."""
    cluster = made_up(4, 1 << 20)
    plan = Plan(devices=4, batch=8, data=2, pipeline=2, microbatches=2)

    def peaks(*levels: int) -> list[int]:
        problem = problem_of(captured("gpt"), cluster)
        for zero in levels:
            found = with_cuts_and_blocks(problem, replace(plan, zero=zero), "none", None)
        return [memory.peak for memory in found.prediction.memory]

    for zero in (0, 1, 2, 3):
        assert peaks(zero) == peaks(*{0, 1, 2, 3} - {zero}, zero)


@pytest.mark.release
@pytest.mark.parametrize("recompute", ["none", "some", "all"])
def test_casts_of_parameters_do_not_wait_for_the_backward(recompute: str) -> None:
    """They are made again there, whatever else is."""
    module, batch, loss_fn = ALL["gpt"].build()
    pins = {"precision": "bf16-params", "recompute": recompute}
    compiler = Compiler(Model(module, loss_fn, 2.0), named_cluster("h100-80gb", 1), pins)
    step, sizes = compiler.capture(as_batch(batch))
    layouts = compiler.layouts(step, sizes)
    problem = Problem(layouts, compiler.cluster, 8, Limits())
    base = base_plan(Pins(precision="bf16-params"), 1, 8, "", "", "loss")
    plan = with_cuts_and_blocks(problem, base, recompute, None)
    exact, _ = compiler.refine(step, plan, as_batch(batch), sizes)
    for guess, real in zip(plan.prediction.memory, exact.prediction.memory, strict=True):
        assert guess.tensors == pytest.approx(real.tensors, rel=0.005)


@dataclass(frozen=True)
class Built:
    """guess: the plan before it was built, on a device's profile; plan, program: what was built."""

    model: nn.Module
    guess: Plan
    profile: Profile
    plan: Plan
    program: StepProgram


def wide_headed(**decided: object) -> Built:
    """A Llama of two layers with more words than layers have numbers, on the meta device."""
    config = transformers.LlamaConfig(
        vocab_size=32768, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.zeros(64, 1024, dtype=torch.int64)
    batch = as_batch({"input_ids": ids, "labels": ids})
    pins = {"precision": "bf16-params", "pipeline": 1, **decided}
    compiler = Compiler(Model(model, None, 2.0), named_cluster("h100-80gb", 8), pins)
    planned: list[Plan] = []
    refine = compiler.refine

    def refined(step: StepGraph, plan: Plan, *given: Any) -> tuple[Plan, StepProgram]:
        planned.append(plan)
        return refine(step, plan, *given)

    compiler.refine = refined  # type: ignore[method-assign]
    step, sizes = compiler.capture(batch)
    chosen = compiler.choose(batch)
    plan, program = chosen.plan, chosen.program
    (guess,) = planned
    return Built(model, guess, compiler.layouts(step, sizes).of(guess), plan, program)


@pytest.mark.release
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_what_follows_the_last_block_stays_for_the_backward(recompute: str) -> None:
    """As wide as it was gathered for the forward, and the last block's parameters beside it."""
    pins = {"data": 8, "zero": 3, "microbatches": 4, "recompute": recompute}
    for fusions in ("off", "auto"):  # a fused head's gradient is there in the forward
        guess, real = tensors_of(wide_headed(**pins, fusions=fusions, min_cut=False))
        assert guess == pytest.approx(real, rel=0.015)


def tensors_of(made: Built) -> tuple[int, int]:
    """Bytes in the estimate and once built."""
    assert made.guess.prediction is not None
    assert made.plan.prediction is not None
    (guess,), (real,) = made.guess.prediction.memory, made.plan.prediction.memory
    return guess.tensors, real.tensors


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_min_cut_saves_less_than_is_estimated(recompute: str) -> None:
    """So what fits by the estimate fits once built."""
    guess, real = tensors_of(wide_headed(data=8, zero=3, microbatches=4, recompute=recompute))
    assert 0.8 * guess < real < guess


@pytest.mark.parametrize("microbatches", [2, 8, 32])
def test_weights_are_planned_as_they_are_built(microbatches: int) -> None:
    """However many examples a step has, and however it is cut."""
    made = wide_headed(data=2, tensor=4, microbatches=microbatches)
    whole = dict(made.model.named_parameters())
    held = {p.name: p.bytes for p in made.profile.parameters if p.name in whole}
    split = {name for name, size in held.items() if size < whole[name].nbytes}
    assert split == {name for name in whole if name in made.program.parameter_shards}
    assert len(split) >= 2 * 7


class Odd(nn.Module):
    """Of its matrices 4 ranks divide two, pad one and can do nothing of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(50, 64, bias=False)
        self.narrow = nn.Linear(64, 50, bias=False)
        self.odd = nn.Linear(50, 30, bias=False)
        self.few = nn.Linear(30, 30, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.odd(self.narrow(torch.tanh(self.wide(x))))).square().mean()


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_zero_pads_or_leaves_whole_is_counted_so(
    zero: int, microbatches: int, made_up: MadeUp
) -> None:
    cluster, batch = made_up(4, 1 << 20), as_batch({"x": torch.randn(8, 50)})
    pins = {"data": 4, "zero": zero, "microbatches": microbatches}
    compiler = Compiler(Model(Odd(), None, 2.0), cluster, pins)
    step, sizes = compiler.capture(batch)
    problem = Problem(compiler.layouts(step, sizes), cluster, 8, Limits())
    base = base_plan(Pins(), 4, 8, "", "", "loss")
    base = replace(base, data=4, zero=zero, microbatches=microbatches)
    plan = with_cuts_and_blocks(problem, base, "none", None)
    exact, _ = compiler.refine(step, plan, batch, sizes)
    assert plan.prediction is not None
    assert exact.prediction is not None
    (guess,), (real,) = plan.prediction.memory, exact.prediction.memory
    own = 50 * 64 * 2 // 4 + 30 * 13 + 30 * 30  # numbers of which a rank keeps state
    assert guess.optimizer == real.optimizer == 8 * own
    assert guess.parameter == real.parameter == (4 * own if zero == 3 else 4 * 8800)
    if zero == 1:  # the peak is in the optimizer's step
        assert guess.tensors == pytest.approx(real.tensors, rel=0.005)
