"""Recorded steps on a recorder that is as strict as CUDA's: the bits are those of the same plan
without, whatever the script does between its steps."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphaccel
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.programs import build
from graphaccel.dispatch import prepare
from graphaccel.errors import CaptureFailed
from graphaccel.ir.program import StageProgram
from graphaccel.kernels.host_copy import TO_HOST
from graphaccel.kernels.ops.expert_rows import EXCHANGE
from graphaccel.kernels.register import op_of
from graphaccel.kernels.registry import fusion_named
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.runtime.cuda_graphs import MOST, WARM, StepGraphs, declined
from graphaccel.sharding.apply.random_parts import DROPOUT_PART
from tests.support.gpt import GPT
from tests.support.inside import captures_in, executors_in
from tests.support.recorder import PoolRecorder
from tests.support.small import Classifier, small_batch


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> PoolRecorder:
    made = PoolRecorder()
    monkeypatch.setattr(prepare, "recorder_for", lambda device: made)
    return made


def gpt(**sizes: Any) -> GPT:
    torch.manual_seed(3)
    given = {"layers": 1, "width": 16, "heads": 2, "context": 16, "vocabulary": 48, **sizes}
    return GPT(**given, deviation=0.15).double()


def ids(step: int, rows: int = 4, tokens: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(48, (rows, tokens), generator=generator)


@cache
def captures(dtype: torch.dtype) -> dict[Any, Any]:
    """Captures of the model: they depend on it and the batch alone."""
    return {}


def pair(dtype: torch.dtype = torch.float64, **pins: Any) -> list[tuple[GPT, Any]]:
    """The same model under the same plan, recorded and not."""
    made = []
    for graphs in (True, False):
        model = gpt().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        given = {"devices": 1, "recompute": "none", **pins}
        made.append(graphaccel.optimize(model, optimizer, cuda_graphs=graphs, **given))
        captures_in(model).steps = captures(dtype)
    return made


def step(model: GPT, optimizer: Any, batch: Tensor, **clear: bool) -> list[Tensor]:
    """Loss and gradients."""
    loss = model(batch, batch)
    loss.backward()
    found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    optimizer.step()
    optimizer.zero_grad(**clear)
    return found


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def graphs_of(model: GPT) -> list[StepGraphs]:
    """One for each shape of the batch."""
    return [e.graphs for e in executors_in(model) if e.graphs is not None]


@pytest.mark.parametrize(
    ("dtype", "pins"),
    [
        ("float64", {"microbatches": 1}),
        ("float64", {"microbatches": 4}),
        ("float64", {"microbatches": 2, "recompute": "all"}),
        ("float32", {"microbatches": 2, "precision": "bf16", "cast_once": True}),
        ("float32", {"microbatches": 2, "precision": "fp16", "cast_once": False}),
    ],
)
def test_steps_have_the_bits_of_the_same_plan_without(
    dtype: str, pins: dict[str, Any], recorder: PoolRecorder
) -> None:
    recorded, plain = pair(getattr(torch, dtype), **pins)
    for number in range(WARM + 3):
        found, expected = (step(*side, ids(number)) for side in (recorded, plain))
        assert same(found, expected), number
    actions = 2 * pins["microbatches"] + bool(pins.get("cast_once"))
    assert len(recorder.made) == actions
    assert {r.replays for r in recorder.made} == {3}
    assert recorder.warmed == WARM * actions
    assert not recorder.arena.taken, "nothing in the pool outlives a step"


@pytest.mark.release
def test_what_a_script_does_between_steps(recorder: PoolRecorder) -> None:
    """Gradients that are kept and added to, zeroed in place, another shape of the batch,
    evaluations, and weights that are loaded."""
    recorded, plain = pair(microbatches=2)
    before = copy.deepcopy(plain[0].state_dict())

    def both(act: Any) -> None:
        found, expected = act(*recorded), act(*plain)
        assert same(found, expected)

    def added(model: GPT, optimizer: Any) -> list[Tensor]:
        losses = [model(ids(n), ids(n)) for n in (1, 2, 3)]
        for loss in losses:
            loss.backward()
        return [*losses, *step(model, optimizer, ids(4))]

    def evaluated(model: GPT, optimizer: Any) -> list[Tensor]:
        with torch.no_grad():
            found = [model(ids(5), ids(5))]
        model.eval()
        with torch.no_grad():
            found.append(model(ids(6)[:1], ids(6)[:1]))
        model.train()
        return found

    def loaded(model: GPT, optimizer: Any) -> list[Tensor]:
        model.load_state_dict(before)
        return step(model, optimizer, ids(0))

    for number in range(WARM + 2):
        both(lambda *side, n=number: step(*side, ids(n)))
    (graphs,) = graphs_of(recorded[0])
    assert (graphs.doing, graphs.recorded) == ("replay", 1)
    for _ in range(3):
        both(added)
    assert graphs.doing == "replay", "as many places for gradients as the script keeps"
    both(evaluated)
    both(loaded)
    for number in range(WARM + 2):
        both(lambda *side, n=number: step(*side, ids(n, tokens=4), set_to_none=False))
    assert graphs_of(recorded[0])[1].recorded >= 1
    known = graphs.recorded
    both(lambda *side: step(*side, ids(7)))
    both(lambda *side: step(*side, ids(8)))
    assert graphs.recorded == known
    assert not recorder.arena.taken


def test_losses_and_gradients_that_are_kept_stay_as_they_were(recorder: PoolRecorder) -> None:
    """A script that keeps every gradient takes another bucket each step: that is not recorded for
    ever."""
    recorded, plain = pair(microbatches=2)
    kept: list[list[Tensor]] = []
    copies: list[list[Tensor]] = []
    for number in range(WARM + MOST + 2):
        for model, _ in (recorded, plain):
            loss = model(ids(number), ids(number))
            loss.backward()
            kept.append([loss, *(p.grad for p in model.parameters())])
            copies.append([t.detach().clone() for t in kept[-1]])
            for p in model.parameters():
                p.grad = None
    assert all(same(a, b) for a, b in zip(kept, copies, strict=True))
    assert all(same(a, b) for a, b in zip(kept[::2], kept[1::2], strict=True))
    (graphs,) = graphs_of(recorded[0])
    assert (graphs.doing, graphs.recorded) == ("left", MOST)


def test_dropout_draws_what_it_draws_without(recorder: PoolRecorder) -> None:
    class Dropping(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x.tanh(), 0.5), y)

    plain = Dropping().double()
    models = [copy.deepcopy(plain), plain]
    for graphs, model in zip((True, False), models, strict=True):
        graphaccel.optimize(model, devices=1, microbatches=2, cuda_graphs=graphs)
    x, y = small_batch()
    for number in range(WARM + 3):
        losses = []
        for model in models:
            torch.manual_seed(number)
            losses.append(model(x.double(), y))
            losses[-1].backward()
        assert torch.equal(*losses), number
        gradients = ([p.grad for p in m.parameters()] for m in models)
        assert same(*gradients), number
    assert recorder.made


def test_a_call_that_can_not_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(PoolRecorder):
        def record(self, run: Any) -> Any:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(prepare, "recorder_for", lambda device: Refusing())
    model = Classifier()
    graphaccel.optimize(model, devices=1, cuda_graphs=True)
    for _ in range(WARM):
        model(*small_batch()).backward()
    with pytest.raises(CaptureFailed) as raised:
        model(*small_batch())
    assert (raised.value.stage, raised.value.phase) == (0, "forward")
    assert raised.value.cause == "CUDA error: operation not permitted when stream is capturing"


def test_an_error_in_the_step_that_records_leaves_no_half_recording(
    recorder: PoolRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, plain = pair(microbatches=2)
    for number in range(WARM):
        assert same(*(step(*side, ids(number)) for side in (recorded, plain)))
    record, calls = recorder.record, []

    def once(run: Any) -> Any:
        calls.append(run)
        if len(calls) == 3:
            raise RuntimeError("interrupted")
        return record(run)

    monkeypatch.setattr(recorder, "record", once)
    with pytest.raises(CaptureFailed, match="interrupted"):
        recorded[0](ids(0), ids(0))
    calls.clear()
    monkeypatch.setattr(recorder, "record", record)
    for number in range(3):
        assert same(*(step(*side, ids(number)) for side in (recorded, plain)))


def why_not(model: nn.Module, batch: Any, plan: Plan) -> str | None:
    return declined(build(capture(model, flatten_call(*as_call(batch))), plan).stages[0])


def test_what_stages_are_declined_for() -> None:
    class Masked(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x.index_put((y > 1,), x.sum(0), accumulate=True), y)

    small = small_batch()
    assert why_not(Classifier(), small, Plan(1, batch=8)) is None
    assert why_not(Classifier(), small, Plan(2, data=2, batch=8)) is None
    assert why_not(Masked(), small, Plan(1, batch=8)) == "ask the device for a value"


def stage_of(target: Any, device: str = "meta") -> StageProgram:
    """A stage whose forward is one call; device: of what it gives."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    made = graph.call_function(target, (x,))
    made.meta["val"] = torch.empty(4, device=device)
    graph.output([made])
    return StageProgram(0, fx.GraphModule({}, graph), (), (), {}, (), ())


def test_calls_that_wait_for_the_device_are_known() -> None:
    experts = torch.ops.graphaccel.expert_product.default
    assert declined(stage_of(experts)) == "have sizes that depend on data"
    assert declined(stage_of(op_of(fusion_named("linear_cross_entropy")))) is None
    assert declined(stage_of(TO_HOST)) == "copy to and from the host"
    assert declined(stage_of(DROPOUT_PART)) == "draw a number on the host"
    assert declined(stage_of(EXCHANGE)) == "send rows to the experts that they chose"
    clone = torch.ops.aten.clone.default
    assert declined(stage_of(clone, "cpu")) == "copy to and from the host"
    assert declined(stage_of(clone)) is None
    assert declined(stage_of(len)) == "run in ONNX Runtime"


def test_the_report_and_the_name_say_it(recorder: PoolRecorder) -> None:
    model = Classifier()
    graphaccel.optimize(model, devices=1, cuda_graphs=True, example_batch=small_batch())
    report = model.graphaccel.report()
    assert plan_name(model.graphaccel.plan).endswith(" · CUDA graphs")
    assert "CUDA graphs: the actions of 1 of 1 stages are recorded" in report
    assert "CUDA graphs have not run on a GPU yet" in report
    again = Plan.from_json(model.graphaccel.plan.to_json())
    assert again.cuda_graphs
    assert again.decisions["cuda_graphs"] is True


def test_a_loss_outside_of_the_graph_is_not_recorded(recorder: PoolRecorder) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    graphaccel.optimize(model, devices=1, cuda_graphs=True)
    for _ in range(WARM + 2):
        model(small_batch()[0]).square().sum().backward()
    assert not recorder.made
    assert "CUDA graphs: none, the script computes the loss" in model.graphaccel.report()
