"""Gradients written and added where they are computed, and the memory they lie in."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import graphaccel
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir.program import StageProgram
from graphaccel.passes.gradients.accumulate_gradients import accumulate_gradients
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.stages.cut_stages import cut_stages
from graphaccel.passes.stages.outline_stages import outline_stages
from graphaccel.passes.stages.split_phases import split_phases
from graphaccel.planner.plan.plan import Plan
from tests.support.parity import build
from tests.support.zoo import call, lift_loss_cast, loss_of

aten = torch.ops.aten
WRITES = (aten.mm.out, aten.copy_.default)
ADDS = (aten.addmm_.default, aten.add_.Tensor)
REDUCE = torch.ops._c10d_functional.all_reduce_.default


def _program(step: StepGraph, data: int = 2, microbatches: int = 2) -> StageProgram:
    plan = Plan(data, data=data, microbatches=microbatches, batch=8, bucket_bytes=1 << 14)
    local = exact_microbatch(step, plan)
    staged = cut_stages(local.graph, step.inputs, step.outputs, step.positions, ())
    (stage,) = split_phases(staged, outline_stages(staged, step))
    return accumulate_gradients(stage, plan)


def _stores(program: StageProgram, graph: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """By parameter: the nodes that write its accumulator, in order."""
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    names = {
        storage_key(n.meta["val"]): v.name
        for n, v in zip(inputs, program.backward_inputs, strict=True)
        if v.kind == "accumulator"
    }
    found: dict[str, list[fx.Node]] = {name: [] for name in names.values()}
    for node in graph.graph.nodes:
        if node.target in (*WRITES, *ADDS):
            found[names[storage_key(node.meta["val"])]].append(node)
    return found


@pytest.mark.parametrize("model", ["gpt", "t5"])
def test_every_gradient_is_written_once_then_added_and_reduced_after(
    captured: Callable[[str], StepGraph], model: str
) -> None:
    program = _program(captured(model))
    assert len(program.buckets) > 1
    for (first, last), graph in program.backwards.items():
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        stores = _stores(program, graph)
        assert all(stores.values())
        for nodes in stores.values():
            kinds = [node.target in WRITES for node in nodes]
            assert kinds == [first] + [False] * (len(nodes) - 1)
        sums = [n for n in graph.graph.nodes if n.target is REDUCE]
        assert len(sums) == (len(program.buckets) if last else 0)
        for bucket, total in zip(program.buckets, sums, strict=False):
            assert order[total] > max(order[n] for name in bucket for n in stores[name])


def test_products_write_into_their_bucket(captured: Callable[[str], StepGraph]) -> None:
    program = _program(captured("gpt"))
    for (first, _), graph in program.backwards.items():
        product = aten.mm.out if first else aten.addmm_.default
        stores = _stores(program, graph)
        assert [n.target for n in stores["blocks.0.qkv.weight"]] == [product]
        tied = [n.target for n in stores["token.weight"]]
        assert tied == [product, aten.add_.Tensor]  # head, then embedding


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["gpt2"])  # tied, and weights that lie the other way
def test_parts_add_up_to_the_gradients_of_the_batch_step_after_step(name: str) -> None:
    plain, batch, loss_fn = build(name, "float64")
    planned, _, _ = build(name, "float64")
    with lift_loss_cast():
        graphaccel.optimize(planned, devices=1, microbatches=4, loss_fn=loss_fn)
        places = []
        for _ in range(3):
            for model in (plain, planned):
                model.zero_grad()
                loss_of(call(model, batch), batch, loss_fn).backward()
            expected, got = _gradients(plain), _gradients(planned)
            assert set(got) == set(expected)
            floor = 1e-12 * max(g.abs().max().item() for g in expected.values())
            for key, true in expected.items():
                torch.testing.assert_close(got[key], true, rtol=1e-10, atol=floor)
            places.append(sorted(g.data_ptr() for g in got.values()))
            del got  # or the next step would leave this memory alone
    assert places[0] == places[1] == places[2]  # the same memory


def test_memory_that_is_still_shown_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    x = torch.randn(8, 4).double()
    planned = copy.deepcopy(model)
    graphaccel.optimize(planned, devices=1, microbatches=2, loss_fn=lambda y: y.square().sum())
    kept = []
    for _ in range(3):
        planned(x).backward()
        assert planned.weight.grad is not None
        kept.append((planned.weight.grad, planned.weight.grad.clone()))
        planned.zero_grad()
    assert len({grad.data_ptr() for grad, _ in kept}) == 3
    assert all(torch.equal(grad, then) for grad, then in kept)
    first, second = planned(x), planned(2 * x)  # two steps before either backward
    (first + second).backward()
    model(x).square().sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(planned.weight.grad, 5 * model.weight.grad, rtol=1e-12, atol=1e-12)
