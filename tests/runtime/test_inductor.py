"""Graphs of stages in pieces: which are compiled, that the rest keeps its order, the numbers."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphaccel
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compat.torch.graphs import BoxedCode
from graphaccel.compat.torch.onednn import opaque_linear
from graphaccel.compat.torch.ops import written_arguments
from graphaccel.compiler.programs import build
from graphaccel.errors import CompileFailed
from graphaccel.ir.program import StageProgram
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.inductor import compile as inductor
from graphaccel.runtime.inductor.compile import StageCompiler, here
from graphaccel.runtime.inductor.partition import notes, pieces
from tests.support.gpt import GPT
from tests.support.small import Classifier, small_batch

Run = Callable[[list[Any]], Sequence[Any]]
MadeUp = Callable[..., Cluster]


def devices(kind: str, made_up: MadeUp) -> Cluster:
    cluster = made_up(1)
    return replace(cluster, device=replace(cluster.device, name=kind))


class Dropping(nn.Module):
    """Two layers and a dropout between them: a draw of random numbers in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x).tanh().square(), 0.5)
        return nn.functional.cross_entropy(self.last(x), y)


def stage_of(model: nn.Module, batch: Any, **decisions: Any) -> StageProgram:
    step: StepGraph = capture(model, flatten_call(*as_call(batch)))
    return build(step, Plan(1, batch=step.batch_size, **decisions)).stages[0]


def plainly(module: fx.GraphModule, inputs: Sequence[Tensor], settings: Any) -> Run:
    """In place of Inductor: the piece as FX code, with the same calling convention."""
    assert not settings
    assert len(module.graph.find_nodes(op="placeholder")) == len(inputs)
    module.graph.set_codegen(BoxedCode())
    module.recompile()
    return module


def kinds(graph: fx.Graph) -> list[tuple[bool, int]]:
    return [(p.compiled, len(p.nodes)) for p in pieces(graph)]


def test_a_draw_splits_the_forward_and_writes_split_the_backward() -> None:
    stage = stage_of(Dropping(), small_batch(), microbatches=2)
    forward = pieces(stage.forward.graph)
    assert [p.compiled for p in forward] == [True, False, True]
    assert next(str(n.target) for n in forward[1].nodes) == "aten.native_dropout.default"
    for moment, graph in stage.backwards.items():
        found = pieces(graph.graph)
        assert sum(p.compiled for p in found) >= 2, moment
        for piece in found:
            writes = [n for n in piece.nodes if written_arguments(n)]
            assert not (piece.compiled and writes), "gradients are added up by torch"


def test_the_report_says_what_is_left_out() -> None:
    step = capture(Dropping(), flatten_call(*as_call(small_batch())))
    program = build(step, Plan(1, batch=8, microbatches=2, compile="inductor"))
    said, warned = notes(program)
    assert said.startswith("Inductor compiles ")
    assert "draw random numbers, in the model's order (1)" in said
    assert "write in place (4)" in said
    assert warned == (
        "time and memory are predicted without Inductor (docs/compile.md says what was measured)"
    )


@pytest.mark.parametrize(
    ("microbatches", "offload"), [(1, "none"), (2, "none"), (2, "optimizer+parameters")]
)
def test_pieces_give_what_the_graph_gives(
    microbatches: int, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner alone, without Inductor: the same bits, in the same order of draws."""
    monkeypatch.setattr(inductor, "compile_graph", plainly)
    torch.manual_seed(1)
    plain = Dropping().double()
    models = [copy.deepcopy(plain) for _ in range(2)]
    x, y = small_batch()
    grads = []
    for model, kind in zip(models, ("off", "inductor"), strict=True):
        pins = {"microbatches": microbatches, "compile": kind, "offload": offload}
        graphaccel.optimize(model, torch.optim.AdamW(model.parameters()), devices=1, **pins)
        torch.manual_seed(5)
        model(x.double(), y).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_loss_outside_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is compiled with the first call, the backward with the first loss of its kind."""
    made: list[Run] = []

    def noted(module: fx.GraphModule, inputs: Sequence[Tensor], settings: Any) -> Run:
        made.append(plainly(module, inputs, settings))
        return made[-1]

    monkeypatch.setattr(inductor, "compile_graph", noted)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softplus(), nn.Linear(8, 4)).double()
    planned = copy.deepcopy(plain)
    graphaccel.optimize(planned, devices=1, compile="inductor")
    x = small_batch()[0].double()
    for model in (plain, planned):
        model(x).square().sum().backward()
    assert len(made) == 2, "a forward and a backward"
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-14)


def test_inputs_die_at_their_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    made = x
    for target in (torch.ops.aten.tanh.default, torch.ops.aten.relu.default) * 2:
        if made is not x and target is torch.ops.aten.tanh.default:
            made = graph.call_function(torch.ops.aten.relu_.default, (made,))
            made.meta["val"] = torch.empty(4, device="meta")
        made = graph.call_function(target, (made,))
        made.meta["val"] = torch.empty(4, device="meta")
    graph.output([made])
    module = fx.GraphModule({}, graph)
    assert [c for c, _ in kinds(graph)] == [True, False, True]
    alive: list[bool] = []

    def watching(module: fx.GraphModule, inputs: Sequence[Tensor], settings: Any) -> Run:
        run = plainly(module, inputs, settings)

        def call(given: list[Any]) -> Sequence[Any]:
            first = weakref.ref(given[0])
            made = run(given)
            gc.collect()
            alive.append(first() is not None)
            return made

        return call

    monkeypatch.setattr(inductor, "compile_graph", watching)
    compiled = StageCompiler(lambda *_: None)._graph(module, 0, "forward", [])
    compiled([torch.ones(4)])
    assert alive == [False, False]


def test_an_error_of_inductor_names_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Run:
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(inductor, "compile_graph", failing)
    model = Classifier()
    graphaccel.optimize(model, devices=1, compile="inductor")
    with pytest.raises(CompileFailed) as raised:
        model(*small_batch())
    assert raised.value.stage == 0
    assert raised.value.phase == "forward"
    assert "reported:  NotImplementedError: no lowering" in str(raised.value)


@pytest.mark.parametrize("asked", [True, False])
def test_what_inductor_refuses_runs_as_fx_code_and_is_said(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Run:
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(inductor, "compile_graph", failing)
    plain = Classifier().double()
    planned = copy.deepcopy(plain)
    x, y = small_batch()
    pins: dict[str, Any] = {"compile": "inductor", "fallback": "fx"}
    if not asked:  # as the default of GPUs is
        plan = graphaccel.plan(planned, example_batch=(x.double(), y), devices=1)
        pins = {"plan": replace(plan, compile="inductor")}
    graphaccel.optimize(planned, devices=1, **pins)
    with pytest.warns(UserWarning, match="refused them: NotImplementedError") as warned:
        planned(x.double(), y).backward()
    forward, backward = (str(w.message) for w in warned)
    assert re.match(r"graphaccel: stage 0, forward: \d+ calls from aten\.\S+ in inner ", forward)
    assert backward.startswith("graphaccel: stage 0, backward: ")
    plain(x.double(), y).backward()
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("pins", "device", "triton"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"compile": "auto", "zero": 3}, "cuda", True),
        ({"compile": "auto"}, "cpu", False),
        ({"compile": "inductor"}, "cuda", False),
        ({"compile": "off"}, "cuda", False),
    ],
)
def test_the_default_is_kept_where_it_can_be(
    pins: dict[str, Any],
    device: str,
    triton: bool,
    made_up: MadeUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inductor, "has_triton", lambda: triton)
    assert here(pins, torch.device(device), devices(device, made_up)) == pins


@pytest.mark.parametrize("pins", [{}, {"compile": "auto"}])
def test_a_gpu_without_triton_runs_fx_code_and_says_so(
    pins: dict[str, Any], made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "has_triton", lambda: False)
    with pytest.warns(UserWarning, match=r"not compiled: Triton is missing \(pip install triton\)"):
        found = here(pins, torch.device("cuda"), devices("cuda", made_up))
    assert found == {"compile": "off"}


def test_a_plan_for_gpus_runs_uncompiled_on_a_cpu(made_up: MadeUp) -> None:
    pins, where = {"zero": 3, "fusions": "auto"}, devices("cuda", made_up)
    found = here(pins, torch.device("cpu"), where)
    assert found == {"compile": "off", "fusions": "auto", "zero": 3}


def test_shapes_that_change_are_compiled_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled: list[fx.GraphModule] = []

    def counted(module: fx.GraphModule, inputs: Sequence[Tensor], settings: Any) -> Run:
        compiled.append(module)
        return plainly(module, inputs, settings)

    monkeypatch.setattr(inductor, "compile_graph", counted)
    plain = Classifier().double()
    planned = copy.deepcopy(plain)
    graphaccel.optimize(planned, devices=1, compile="inductor", max_programs=2)
    x, y = small_batch()
    counts = []
    for rows in (4, 5, 6, 7, 4):
        batch = x.double()[:1].repeat(rows, 1), y[:1].repeat(rows)
        planned(*batch).backward()
        plain(*batch).backward()
        counts.append(len(compiled))
    assert 0 < counts[0] < counts[1]
    assert counts[1:] == counts[1:2] * 4
    assert capfd.readouterr().err.count("compiled max_programs=2 shapes") == 1
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_gpt_by_inductor_trains_as_in_eager_mode() -> None:
    """The only test that compiles: forward and backward of one layer, in float64."""
    torch.manual_seed(3)
    plain = GPT(layers=1, width=16, heads=2, context=8, vocabulary=48, deviation=0.15).double()
    planned = copy.deepcopy(plain)
    ids = torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(2))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, planned)]
    graphaccel.optimize(planned, optimizers[1], devices=1, compile="inductor")
    for _ in range(3):
        losses = []
        for model, optimizer in zip((plain, planned), optimizers, strict=True):
            loss = model(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-12
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
    assert "Inductor compiles" in planned.graphaccel.report()


def test_products_by_onednn_are_called_as_they_are() -> None:
    """Inductor's own lowering of them takes constant weights only."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    x, weight, bias = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4)
    op = opaque_linear()
    for given in (bias, None):
        torch.testing.assert_close(op(x, weight, given), nn.functional.linear(x, weight, given))
    torch.library.opcheck(op, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
    assert opaque_linear() is op
