"""The passes on a tiny model: their text, and that they compute what eager does, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.ir.text import graph_text
from graphaccel.passes.activations.recompute import recompute
from graphaccel.passes.gradients.accumulate_gradients import accumulate_gradients
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.stages.cut_stages import cut_stages
from graphaccel.passes.stages.outline_stages import outline_stages
from graphaccel.passes.stages.split_phases import split_phases
from graphaccel.passes.stages.split_weights import split_weights
from graphaccel.planner.plan.plan import Plan, Precision

Golden = Callable[[str, str], None]


class Tiny(nn.Module):
    """Two blocks and a loss with an ignored label."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.blocks[0](x))
        return F.cross_entropy(self.blocks[1](hidden), labels)


def tiny() -> tuple[Tiny, Batch]:
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, -100, 2, 1, -100, -100, 0])
    return Tiny().double(), flatten_call((torch.randn(8, 4).double(), labels), {})


def values(model: nn.Module, batch: Batch, step: StepGraph) -> list[torch.Tensor]:
    held = dict(model.named_parameters())
    return [
        batch.leaves[i.leaf] if i.kind == "batch" else held[i.name].detach() for i in step.inputs
    ]


def eager(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    loss = model(*batch.leaves)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def close(got: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_canonical_joint_graph(golden: Golden) -> None:
    model, batch = tiny()
    step = capture(model, batch)
    golden("pass-canonical", graph_text(step.forward.graph.graph) + "\n" + step.text())
    close(step.graph(*values(model, batch, step)), eager(model, batch))


def test_bf16(golden: Golden) -> None:
    model, batch = tiny()
    model.float()
    batch = replace(batch, leaves=(batch.leaves[0].float(), batch.leaves[1]))
    step = capture(model, batch)
    low = lower_precision(step, Plan(1, precision=Precision(compute="bfloat16"), batch=8))
    golden("pass-bf16", graph_text(low.forward.graph.graph))
    got = low.graph(*values(model, batch, low))
    assert all(g.dtype == torch.float32 for g in got)
    close(got, eager(model, batch), 2e-2)


def test_two_microbatches_add_up(golden: Golden) -> None:
    model, batch = tiny()
    step = capture(model, batch)
    local = exact_microbatch(step, Plan(1, microbatches=2, batch=8))
    assert local.prologue is not None
    prologue = local.prologue
    golden(
        "pass-microbatch", graph_text(prologue.graph.graph) + "\n" + graph_text(local.graph.graph)
    )
    whole = prologue.graph(*(batch.leaves[v.leaf] for v in prologue.inputs))
    totals: list[torch.Tensor] = []
    for half in (slice(0, 4), slice(4, 8)):
        part = replace(batch, leaves=tuple(x[half] for x in batch.leaves))
        got = local.graph(*values(model, part, step), *whole)
        totals = [a + b for a, b in zip(totals, got, strict=True)] if totals else list(got)
    close(totals, eager(model, batch))


def test_recomputed_values_are_the_same_bits(golden: Golden) -> None:
    model, batch = tiny()
    step = capture(model, batch)
    before = step.graph(*values(model, batch, step))
    local = exact_microbatch(step, Plan(1, batch=8)).graph
    again = recompute(local, Plan(1, recompute=("blocks.0",), batch=8), step.positions)
    golden("pass-recompute", graph_text(again.graph, notes=True))
    assert all(
        torch.equal(a, b) for a, b in zip(again(*values(model, batch, step)), before, strict=True)
    )


def test_two_stages(golden: Golden) -> None:
    model, batch = tiny()
    step = capture(model, batch)
    graph = exact_microbatch(step, Plan(1, batch=8)).graph
    cut = next(n.name for n in step.forward.graph.graph.nodes if "tanh" in n.name)
    staged = cut_stages(graph, step.inputs, step.outputs, step.positions, (cut,))
    stages = split_phases(staged, outline_stages(staged, step))
    text = [
        f"stage {s.stage} {name}\n{graph_text(module.graph)}"
        for s in stages
        for name, module in (("forward", s.forward), ("backward", s.backwards[True, True]))
    ]
    golden("pass-two-stages", "\n".join(text))
    held = dict(zip([i.name for i in step.inputs], values(model, batch, step), strict=True))
    saved: list[dict[str, torch.Tensor]] = []
    for stage in stages:
        out = stage.forward(*(held[v.name] for v in stage.forward_inputs))
        made = {v.name: o for v, o in zip(stage.forward_outputs, out, strict=True)}
        held |= {v.name: made[v.name] for v in stage.forward_outputs if v.kind == "sent"}
        saved.append(made)
    loss = [saved[-1][v.name] for v in stages[-1].forward_outputs if v.kind == "loss"]
    gradients: dict[str, torch.Tensor] = {}
    for stage in reversed(stages):
        given = held | saved[stage.stage]
        out = stage.backwards[True, True](*(given[v.name] for v in stage.backward_inputs))
        for value, result in zip(stage.backward_outputs, out, strict=True):
            (gradients if value.kind == "gradient" else held)[value.name] = result
    close([*loss, *(gradients[n] for n, _ in model.named_parameters())], eager(model, batch))


def test_weights_apart(golden: Golden) -> None:
    model, batch = tiny()
    step = capture(model, batch)
    plan = Plan(1, batch=8, schedule="zero_bubble")
    graph = exact_microbatch(step, plan).graph
    cut = next(n.name for n in step.forward.graph.graph.nodes if "tanh" in n.name)
    staged = cut_stages(graph, step.inputs, step.outputs, step.positions, (cut,))
    stages = split_phases(staged, outline_stages(staged, step))
    backwards, weights = split_weights(stages, plan)
    golden(
        "pass-split-weights",
        "\n".join(
            f"stage {s.stage} {name}\n{graph_text(s.backwards[True, True].graph)}"
            for pair in zip(backwards, weights, strict=True)
            for name, s in zip(("backward", "weight"), pair, strict=True)
        ),
    )
    held = dict(zip([i.name for i in step.inputs], values(model, batch, step), strict=True))
    saved: list[dict[str, torch.Tensor]] = []
    for stage in stages:
        out = stage.forward(*(held[v.name] for v in stage.forward_inputs))
        made = {v.name: o for v, o in zip(stage.forward_outputs, out, strict=True)}
        held |= {v.name: made[v.name] for v in stage.forward_outputs if v.kind == "sent"}
        saved.append(made)
    gradients: dict[str, torch.Tensor] = {}
    for phases in (backwards, weights):  # no stage's backward waits for weights
        for stage in reversed(phases):
            given = held | saved[stage.stage]
            out = stage.backwards[True, True](*(given[v.name] for v in stage.backward_inputs))
            for value, result in zip(stage.backward_outputs, out, strict=True):
                kinds = {"gradient": gradients, "saved": saved[stage.stage]}
                kinds.get(value.kind, held)[value.name] = result
    close([gradients[n] for n, _ in model.named_parameters()], eager(model, batch)[1:])


def test_gradients_accumulate_over_microbatches(golden: Golden) -> None:
    model, batch = tiny()
    step = capture(model, batch)
    plan = Plan(1, microbatches=2, batch=8)
    local = exact_microbatch(step, plan)
    staged = cut_stages(local.graph, step.inputs, step.outputs, step.positions, ())
    (stage,) = split_phases(staged, outline_stages(staged, step))
    stage = accumulate_gradients(stage, plan)
    golden("pass-accumulate", graph_text(stage.backwards[False, True].graph))
    assert local.prologue is not None
    whole = local.prologue.graph(*(batch.leaves[v.leaf] for v in local.prologue.inputs))
    held = dict(zip(local.prologue.outputs, whole, strict=True))
    parameters = dict(model.named_parameters())
    sums = {n: torch.full_like(p, float("nan")) for n, p in parameters.items()}
    for number in (0, 1):
        part = replace(batch, leaves=tuple(x[4 * number :][:4] for x in batch.leaves))
        given = held | dict(
            zip([i.name for i in step.inputs], values(model, part, step), strict=True)
        )
        out = stage.forward(*(given[v.name] for v in stage.forward_inputs))
        given |= {v.name: o for v, o in zip(stage.forward_outputs, out, strict=True)}
        backward = stage.backwards[number == 0, number == 1]
        backward(
            *((sums if v.kind == "accumulator" else given)[v.name] for v in stage.backward_inputs)
        )
    close([sums[n] for n in parameters], eager(model, batch)[1:])
