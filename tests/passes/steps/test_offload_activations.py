"""Activations copied to the host and back: as text, and bitwise the values of before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.ir.program import StageProgram
from graphaccel.ir.text import graph_text
from graphaccel.kernels.host_copy import TO_DEVICE, TO_HOST
from graphaccel.passes.activations.offload_activations import offload_activations
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.stages.cut_stages import cut_stages
from graphaccel.passes.stages.outline_stages import outline_stages
from graphaccel.passes.stages.split_phases import split_phases
from graphaccel.planner.memory.liveness import Liveness
from graphaccel.planner.plan.plan import Plan

Golden = Callable[[str, str], None]
ROWS, LENGTH = 64, 512


class Views(nn.Module):
    """A value of 2 MiB that the backward reads as it is and flattened, one whose memory is not in
    the order of its dims, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(x))
        turned = torch.sigmoid(self.b(hidden).transpose(0, 2))
        return F.mse_loss(turned.sum(2).t().sum(0), y)


def _program(offload: tuple[str, ...]) -> tuple[StageProgram, dict[str, torch.Tensor]]:
    """One stage's program, and what it is given."""
    torch.manual_seed(0)
    model = Views().double()
    batch = flatten_call((torch.randn(ROWS, LENGTH, 4).double(), torch.randn(8).double()), {})
    step = capture(model, batch)
    plan = Plan(1, batch=ROWS, offload=offload)
    graph = exact_microbatch(step, plan).graph
    staged = cut_stages(graph, step.inputs, step.outputs, step.positions, ())
    (stage,) = split_phases(staged, outline_stages(staged, step))
    held = {n: p.detach() for n, p in model.named_parameters()}
    held |= {i.name: batch.leaves[i.leaf] for i in step.inputs if i.kind == "batch"}
    return offload_activations(stage, plan), held


def _run(
    stage: StageProgram, held: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    out = stage.forward(*(held[v.name] for v in stage.forward_inputs))
    saved = {v.name: o for v, o in zip(stage.forward_outputs, out, strict=True)}
    given = held | saved
    backward = stage.backwards[True, True]
    return saved, [*out[:1], *backward(*(given[v.name] for v in stage.backward_inputs))]


def test_large_values_wait_on_the_host(golden: Golden) -> None:
    kept, held = _program(())
    away, _ = _program(("activations",))
    texts = [graph_text(m.graph) for m in (away.forward, away.backwards[True, True])]
    golden("pass-offload", "forward\n{}\nbackward\n{}".format(*texts))
    _, before = _run(kept, held)
    saved, after = _run(away, held)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    large = [v for v in saved.values() if v.numel() * v.element_size() >= 2**20]
    assert [v.dim() for v in large] == [1] * len(large)
    calls = [n.target for m in (away.forward, *away.backwards.values()) for n in m.graph.nodes]
    assert calls.count(TO_HOST) == calls.count(TO_DEVICE) == len(large) > 1


def test_nothing_changes_without_it() -> None:
    kept, _ = _program(())
    other, _ = _program(("optimizer",))
    for a, b in zip(kept.graphs, other.graphs, strict=True):
        assert graph_text(a.graph) == graph_text(b.graph)


def test_liveness_counts_them_on_the_host() -> None:
    def after_forward(offload: tuple[str, ...]) -> tuple[int, int]:
        stage, _ = _program(offload)
        count = Liveness()
        results = count.run(stage.forward, [[] for _ in stage.forward_inputs], "forward", 0)
        assert results
        return count.total, count.host_peak

    kept, none = after_forward(())
    away, host = after_forward(("activations",))
    assert none == 0
    assert kept - away == host >= 2**21
