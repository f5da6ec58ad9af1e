"""What the tokens of a batch choose, tried before anything runs, and what is predicted from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphaccel.capture.batch import Batch
from graphaccel.compiler import probe_routing as routing
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.probe_routing import fullest, share_of, tried_choices
from graphaccel.compiler.schedules import schedule_of
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.memory.exact_memory import rank_memory
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Chosen
from graphaccel.report.assumptions import assumed_of
from tests.support.zoo import ALL, call

CPU = cluster("cpu", 4)


def chosen_by_eager(model: nn.Module, batch: Any, parts: int, devices: int) -> list[list[Tensor]]:
    """[layer][part] → rows of each device, counted at the routers of the model itself."""
    found: list[list[Tensor]] = []
    for router in (m for n, m in model.named_modules() if n.endswith("mlp.gate")):
        layer: list[Tensor] = []
        router.register_forward_hook(lambda _, __, out, layer=layer: layer.append(out[2]))
        found.append(layer)
    with torch.no_grad():
        for part in range(parts):
            call(model, {k: v.chunk(parts)[part] for k, v in batch.items()})
    return [
        [torch.bincount(ids.flatten(), minlength=4).view(devices, -1).sum(1) for ids in layer]
        for layer in found
    ]


@pytest.mark.parametrize(("data", "microbatches", "expert"), [(1, 1, 2), (2, 1, 2), (1, 4, 4)])
def test_tried_is_what_the_model_itself_chooses(
    data: int, microbatches: int, expert: int, captures: dict[Any, Any]
) -> None:
    model, batch, _ = ALL["mixtral"].build()
    compiler = Compiler(Model(model, None, 0.0), CPU, {})
    compiler.captures.steps = captures
    step, sizes = compiler.capture(as_batch(batch))
    plan = Plan(data * expert, data=data, expert=expert, microbatches=microbatches, batch=8)
    state, before = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    tried = tried_choices(step, model, as_batch(batch), plan, sizes).chosen
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    wanted = chosen_by_eager(model, batch, data * microbatches, expert)
    assert [each.block for each in tried] == [f"model.layers.{i}" for i in range(4)]
    for each, rows in zip(tried, wanted, strict=True):
        even = rows[0].sum() / expert
        for place, shares in enumerate(each.shares):
            own = torch.stack(rows[place * microbatches : (place + 1) * microbatches])
            assert shares == pytest.approx((own.amax(0) / even).tolist(), rel=1e-6)


PINS = {"data": 2, "expert": 2, "pipeline": 1, "microbatches": 1, "recompute": "none"}


@pytest.fixture(scope="module")
def captures() -> dict[Any, Any]:
    """What capturing gives, which no weight is read for: one does for all tests."""
    return {}


def compiled(captures: dict[Any, Any]) -> tuple[Compiler, Batch]:
    model, batch, _ = ALL["mixtral"].build()
    compiler = Compiler(Model(model, None, 2.0), CPU, PINS)
    compiler.captures.steps = captures
    return compiler, as_batch(batch)


def test_a_plan_is_predicted_for_its_fullest_device(captures: dict[Any, Any]) -> None:
    compiler, batch = compiled(captures)
    planned = compiler.choose(batch)
    plan, program = planned.plan, planned.program
    assert plan.prediction is not None
    chosen = plan.prediction.chosen
    places = [(d, e) for d in range(2) for e in range(2)]
    each = {at: compiler.memory(planned, batch).of_device(0, *at) for at in places}
    peaks = {at: memory.peak for at, memory in each.items() if memory is not None}
    most = plan.prediction.memory[0]
    assert most.peak == max(peaks.values())
    resident = compiler.model.resident(batch, plan, program)
    even = rank_memory(program, schedule_of(plan, program), 0, resident, most.other)
    assert min(peaks.values()) < even.peak < most.peak
    assert most.chosen == most.peak - even.peak
    assert most.uneven >= 0
    share = max(s for block in chosen for row in block.shares for s in row)
    said = f"experts chosen as the example batch does, a device up to {share:.2f} of an even share"
    optimizer = torch.optim.AdamW(compiler.model.module.parameters())
    assert assumed_of(optimizer, plan) == f"AdamW; {said}"
    assert Plan.from_json(plan.to_json()) == plan


def test_another_rank_predicts_what_the_first_one_tried(captures: dict[Any, Any]) -> None:
    first, batch = compiled(captures)
    plan = first.choose(batch).plan
    second, _ = compiled(captures)
    with torch.no_grad():
        for parameter in second.model.module.parameters():
            parameter.zero_()  # here all would choose the same
    adopted = second.choose(batch, given=plan).plan
    assert adopted.prediction == plan.prediction


def _assumed(compiler: Compiler, batch: Batch) -> str:
    """The plan's note, of a plan that is predicted for an even choice."""
    chosen = compiler.choose(batch)
    plan = chosen.plan
    assert plan.prediction is not None
    assert plan.prediction.chosen == ()
    assert assumed_of(None, plan) == (
        "no optimizer state; each expert chosen as often as the others"
    )
    assert compiler.memory(chosen, batch).of_device(0, 1, 1) == plan.prediction.memory[0]
    (note,) = [n for n in plan.notes if n.startswith("an even choice")]
    return note


def test_without_weights_an_even_choice_is_assumed(captures: dict[Any, Any]) -> None:
    model, batch, _ = ALL["mixtral"].build()
    compiler = Compiler(Model(model.to("meta"), None, 2.0), CPU, PINS)
    compiler.captures.steps = captures
    said = "an even choice of experts is assumed: the model or its batch has no data"
    assert _assumed(compiler, as_batch(batch)) == said


def test_trying_may_not_take_long(
    captures: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, batch = compiled(captures)
    monkeypatch.setitem(routing.AFFORDED, "cpu", 2e3)
    said = "a forward takes 2e+07 FLOPs, and 2e+03 are spent on it at most"
    assert _assumed(compiler, batch) == f"an even choice of experts is assumed: {said}"


def test_trying_may_not_need_more_memory_than_there_is(
    captures: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, batch = compiled(captures)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(routing, "run_routes", full)
    said = "the model and 4 examples do not fit on one cpu"
    assert _assumed(compiler, batch) == f"an even choice of experts is assumed: {said}"


def test_shares_of_blocks_and_the_fullest_device() -> None:
    chosen = (
        Chosen("layers.0", ((0.5, 1.5), (1.0, 1.0))),
        Chosen("layers.1", ((1.0, 1.0), (1.75, 0.25))),
    )
    share = share_of(chosen, 1, 0)
    assert share("layers.1.mlp.experts") == 1.75
    assert share("layers.0.mlp") == share("head") == 1.0


def test_devices_that_may_be_fullest() -> None:
    chosen = (
        Chosen("layers.0", ((0.5, 1.5), (1.2, 0.8))),
        Chosen("layers.1", ((1.6, 0.4), (1.2, 0.8))),
        Chosen("layers.2", ((0.25, 1.75), (1.0, 1.0))),
    )

    def shares(*blocks: str) -> list[list[float]]:
        return [[of(each.block) for each in chosen] for of in fullest(chosen, blocks)]

    assert shares("layers.0") == [[1.5, 0.4, 1.75]]
    # Most of all that is kept, and most of a single block, which may be computed again.
    assert shares("layers.0", "layers.1") == [[1.2, 1.2, 1.0], [0.5, 1.6, 0.25]]
    assert shares("head") == [[1.0, 1.0, 1.0]]


class Two(nn.Module):
    """Experts looked up in two layers, of which the second has `second`."""

    def __init__(self, second: int) -> None:
        super().__init__()
        self.up = nn.ParameterList(nn.Parameter(torch.randn(n, 8, 8)) for n in (4, second))
        self.gate = nn.ParameterList(nn.Parameter(torch.randn(8, n)) for n in (4, second))

    def forward(self, x: Tensor) -> Tensor:
        for up, gate in zip(self.up, self.gate, strict=True):
            best = (x @ gate).argmax(-1)
            x = x + torch.bmm(x[:, None], up[best])[:, 0]
        return (x**2).sum()


def test_experts_that_an_axis_does_not_divide_are_left_out() -> None:
    model, batch = Two(6), as_batch((torch.randn(16, 8),))
    compiler = Compiler(Model(model, None, 0.0), CPU, {})
    step, sizes = compiler.capture(batch)
    found = {
        expert: tried_choices(step, model, batch, Plan(expert, expert=expert, batch=16), sizes)
        for expert in (2, 4, 3)
    }
    assert not any(each.unknown for each in found.values())
    (both,), (first,), (second,) = (found[n].chosen for n in (2, 4, 3))
    assert len(both.shares[0]) == 2
    assert sum(first.shares[0]) == pytest.approx(4)
    assert sum(second.shares[0]) == pytest.approx(3)


def test_trying_may_fail(captures: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, batch = compiled(captures)

    def refuse(*_: Any) -> None:
        raise NotImplementedError('"mm" not implemented for this\nand more')

    monkeypatch.setattr(routing, "run_routes", refuse)
    said = 'trying failed, "mm" not implemented for this'
    assert _assumed(compiler, batch) == f"an even choice of experts is assumed: {said}"
