"""The joint graph of two stages becomes a forward and a backward of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.ir.program import StageProgram
from graphaccel.passes.stages.cut_stages import cut_stages
from graphaccel.passes.stages.outline_stages import outline_stages
from graphaccel.passes.stages.split_phases import split_phases
from tests.passes.support import joint, text_of, values_of
from tests.passes.test_cut_stages import GRAPH, ORIGINS, cut

BEFORE = GRAPH
AFTER = """\
# stage 0
forward(parameter w, batch x #0) -> (sent mm)
%w: f64[3,3] = input
%x: f64[4,3] = input
%mm: f64[4,3] = aten.mm(%x, %w)    # forward a
return (%mm)
backward first last(batch x #0, received mm_3) -> (gradient w)
%x: f64[4,3] = input
%mm_3: f64[4,3] = input
%t_2: f64[3,4] = aten.t(%x)    # backward a
%mm_4: f64[3,3] = aten.mm(%t_2, %mm_3)    # backward a
return (%mm_4)
# stage 1
forward(parameter w, received mm) -> (loss, saved mm, saved mm_1)
%w: f64[3,3] = input
%mm: f64[4,3] = input
%mm_1: f64[4,3] = aten.mm(%mm, %w)    # forward b
%sum_1: f64[] = aten.sum(%mm_1)    # forward
return (%sum_1, %mm, %mm_1)
backward first last(parameter w, saved mm, saved mm_1) -> (gradient w, sent mm_3)
%w: f64[3,3] = input
%mm: f64[4,3] = input
%mm_1: f64[4,3] = input
%ones_like: f64[4,3] = aten.ones_like(%mm_1)    # backward
%t: f64[3,4] = aten.t(%mm)    # backward b
%mm_2: f64[3,3] = aten.mm(%t, %ones_like)    # backward b
%t_1: f64[3,3] = aten.t(%w)    # backward b
%mm_3: f64[4,3] = aten.mm(%ones_like, %t_1)    # backward b
return (%mm_2, %mm_3)
"""


INPUTS = (GraphInput("parameter", "w"), GraphInput("batch", "x", leaf=0))
OUTPUTS = (GraphOutput("loss"), GraphOutput("gradient", name="w"))


def programs() -> tuple[StageProgram, ...]:
    staged = cut(("mm",))
    step: Any = SimpleNamespace(inputs=INPUTS, outputs=OUTPUTS, batch_dims={0: 0})
    return split_phases(staged, outline_stages(staged, step))


def applied() -> str:
    return "".join(f"# stage {each.stage}\n{text_of(each)}" for each in programs())


def test_text() -> None:
    assert applied() == AFTER


def test_values() -> None:
    """Forwards from the first stage to the last, backwards the other way."""
    w, x = values_of(joint(GRAPH))
    loss, gradient = joint(GRAPH)(w, x)
    known: dict[Any, Any] = {"w": w, "x": x}
    first, last = programs()
    total = torch.zeros_like(w)
    phases = [(each.forward, each.forward_inputs, each.forward_outputs) for each in (first, last)]
    for each in (last, first):
        phases.append((each.backwards[True, True], each.backward_inputs, each.backward_outputs))
    for graph, inputs, outputs in phases:
        results = graph(*(known[value.name] for value in inputs))
        for value, result in zip(outputs, results, strict=True):
            if value.kind == "gradient":
                total += result
            else:
                known[value.name or value.kind] = result
    assert torch.equal(known["loss"], loss)
    torch.testing.assert_close(total, gradient, rtol=1e-12, atol=1e-12)


def test_what_only_a_dropped_output_reads_is_not_computed() -> None:
    text = GRAPH.replace(
        "%ones_like:", "%mean: f64[] = aten.mean(%mm)    # forward\n%ones_like:"
    ).replace("return (%sum_1,", "return (%sum_1, %mean,")
    module = joint(text)
    for node in module.graph.nodes:
        node.meta["origin"] = ORIGINS.get(node.name, node.name)
    outputs = (OUTPUTS[0], GraphOutput("output", leaf=1), OUTPUTS[1])
    staged = cut_stages(module, INPUTS, outputs, {"mm": 0, "mm_1": 1, "sum_1": 2, "mean": 3}, ())
    step: Any = SimpleNamespace(inputs=INPUTS, outputs=outputs, batch_dims={0: 0})
    (dropped,) = split_phases(staged, outline_stages(staged, step))
    (kept,) = split_phases(staged, outline_stages(staged, step, keep_outputs=True))
    assert "aten.mean" not in text_of(dropped)
    assert "aten.mean" in text_of(kept)
