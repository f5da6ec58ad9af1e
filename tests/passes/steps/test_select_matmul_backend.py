"""Products by oneDNN: which are exchanged, and that the numbers are those of one device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.programs import build
from graphaccel.ir.program import StageProgram
from graphaccel.ir.text import target_text
from graphaccel.passes import select_matmul_backend as module
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.select_matmul_backend import select_matmul_backend
from graphaccel.passes.stages.cut_stages import cut_stages
from graphaccel.passes.stages.outline_stages import outline_stages
from graphaccel.passes.stages.split_phases import split_phases
from graphaccel.planner.plan.plan import Plan

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
ROWS, NARROW, WIDE = 64, 128, 512  # 8.4 MFLOP a product


class Layers(nn.Module):
    """One layer with a bias, one without, one too small to gain."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW, bias=False)
        self.last = nn.Linear(NARROW, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.down(torch.tanh(self.up(x))))).square().sum()


def _program(model: nn.Module, x: torch.Tensor) -> StageProgram:
    step = capture(model, flatten_call((x,), {}))
    local = exact_microbatch(step, Plan(1, batch=ROWS))
    staged = cut_stages(local.graph, step.inputs, step.outputs, step.positions, ())
    (stage,) = split_phases(staged, outline_stages(staged, step))
    return stage


def _counts(program: StageProgram) -> Counter[str]:
    graphs = (program.forward, *program.backwards.values())
    return Counter(target_text(n.target) for g in graphs for n in g.graph.nodes)


def _model(dtype: torch.dtype) -> tuple[Layers, torch.Tensor]:
    torch.manual_seed(0)
    return Layers().to(dtype), torch.randn(ROWS, NARROW, dtype=dtype)


def test_large_products_are_exchanged_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    model, x = _model(torch.float32)
    program = select_matmul_backend(_program(model, x))
    found = _counts(program)
    # up: forward and weight (x needs no gradient); down: forward, input and weight
    assert found["mkldnn._linear_pointwise"] == 5
    assert found["aten.addmm"] == 1
    assert found["aten.mm"] == 2
    held = dict(model.named_parameters()) | {"x": x}
    given = {v.name: held.get(v.name, x).detach() for v in program.forward_inputs}
    made = program.forward(*(given[v.name] for v in program.forward_inputs))
    given |= {v.name: o for v, o in zip(program.forward_outputs, made, strict=True)}
    (backward,) = program.backwards.values()
    out = backward(*(given[v.name] for v in program.backward_inputs))
    got = {v.name: o for v, o in zip(program.backward_outputs, out, strict=True)}
    double, x = model.double(), x.double()
    double(x).backward()
    for name, parameter in double.named_parameters():
        assert parameter.grad is not None
        error = (got[name].double() - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error <= 5e-6, name
        assert got[name].stride() == parameter.stride(), name


def test_other_dtypes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    program = _program(*_model(torch.float64))
    before = _counts(program)
    assert _counts(select_matmul_backend(program)) == before


def test_where_mkl_is_fast_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mkl_is_slow", lambda: False)
    program = _program(*_model(torch.float32))
    before = _counts(program)
    assert _counts(select_matmul_backend(program)) == before


@pytest.mark.parametrize(("device", "exchanged"), [("cpu", True), ("cuda", False)])
def test_what_runs_on_a_gpu_has_no_op_of_the_cpu_that_plans(
    device: str, exchanged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    step = capture(*_captured(torch.float32))
    (stage,) = build(step, Plan(1, batch=ROWS), device=device).stages
    assert ("mkldnn._linear_pointwise" in _counts(stage)) is exchanged


def _captured(dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    model, x = _model(dtype)
    return model, flatten_call((x,), {})
