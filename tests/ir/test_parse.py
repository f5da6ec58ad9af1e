"""Graph text that is read back is the graph that was printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.ir.parse import parse_graph
from graphaccel.ir.text import graph_text
from graphaccel.kernels.ops import (
    experts,  # noqa: F401  # they define ops
)
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from tests.support.zoo import ALL

GOLDEN = Path(__file__).parent.parent / "golden"
_STATED = ("phase", "module", "made_by")


def graphs_in(text: str) -> list[str]:
    """The graphs in a golden text, which has headings between them."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith(("%", "return (")):
            found[-1].append(line)
        if line.startswith("return ("):
            found.append([])
    return ["\n".join(lines) + "\n" for lines in found if lines]


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("pass-*.txt"))])
def test_golden_texts(name: str) -> None:
    texts = graphs_in((GOLDEN / f"{name}.txt").read_text())
    assert texts
    for text in texts:
        assert graph_text(parse_graph(text).graph, notes=True) == text


def assert_read_back(module: fx.GraphModule) -> None:
    """The graph that was read back prints alike and states the same of every node."""
    text = graph_text(module.graph, notes=True)
    read = parse_graph(text)
    assert graph_text(read.graph, notes=True) == text
    for node, other in zip(module.graph.nodes, read.graph.nodes, strict=True):
        assert (node.op, node.name) == (other.op, other.name)
        if node.op == "call_function":
            assert node.target is other.target
            assert [node.meta.get(k, "") for k in _STATED] == [
                other.meta.get(k, "") for k in _STATED
            ]


@pytest.mark.parametrize("name", ALL)
def test_captured_steps(name: str, captured: Callable[[str], StepGraph]) -> None:
    step = captured(name)
    assert_read_back(step.graph)
    assert_read_back(step.forward.graph)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, data=2, microbatches=2, batch=8, zero=3, reshard_after_forward="once_per_step"),
        Plan(2, data=2, microbatches=2, batch=8),
        Plan(4, tensor=2, context=2, batch=8),
    ],
    ids=plan_name,
)
def test_graphs_of_stages(plan: Plan, captured: Callable[[str], StepGraph]) -> None:
    """With collectives, and with calls that write in place."""
    for stage in build(captured("gpt"), plan).stages:
        for module in stage.graphs:
            assert_read_back(module)


def test_values_and_notes() -> None:
    read = parse_graph(
        "# a heading\n"
        "%x: bf16[2,3] = input\n"
        "%c: i64[] = constant\n"
        "%gelu: bf16[2,3] = aten.gelu(%x, approximate=tanh)    # forward a.0 by fuse rms_norm\n"
        "%cat: bf16[4,3] = aten.cat([%x, %gelu])    # by recompute\n"
        "%max_1: (bf16[4], i64[4]) = aten.max.dim(%cat, -1)    # backward\n"
        "%getitem: bf16[4] = getitem(%max_1, 0)\n"
        "%to: f32[4] = aten._to_copy(%getitem, dtype=f32, device=cpu)\n"
        "%full: f32[2] = aten.full([2], 1e-06, layout=torch.strided, pin_memory=False)\n"
        "return (%to, %full, None)\n"
    )
    x, c, gelu, cat, highest, _, to, full, output = read.graph.nodes
    assert (x.op, c.op) == ("placeholder", "get_attr")
    assert x.meta["val"].dtype == torch.bfloat16
    assert gelu.kwargs == {"approximate": "tanh"}
    assert gelu.meta["phase"] == "forward"
    assert (gelu.meta["module"], gelu.meta["made_by"]) == ("a.0", "fuse rms_norm")
    assert list(cat.args[0]) == [x, gelu]
    assert cat.meta["made_by"] == "recompute"
    assert "phase" not in cat.meta
    assert highest.args == (cat, -1)
    assert to.kwargs == {"dtype": torch.float32, "device": torch.device("cpu")}
    assert full.args == ([2], 1e-6)
    assert full.kwargs == {"layout": torch.strided, "pin_memory": False}
    assert output.args == ([to, full, None],)


def test_views_share_memory_and_calls_have_the_strides_of_their_op() -> None:
    read = parse_graph("%x: f32[2,3] = input\n%t: f32[3,2] = aten.t(%x)\nreturn (%t)\n")
    x, t, _ = read.graph.nodes
    assert t.meta["val"].stride() == (1, 3)
    assert t.meta["val"].untyped_storage()._cdata == x.meta["val"].untyped_storage()._cdata


def test_the_graph_runs() -> None:
    read = parse_graph(
        "%x: f64[2,3] = input\n%s: f64[2] = aten.sum.dim_IntList(%x, [1])\nreturn (%s)\n"
    )
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    assert torch.equal(read(x)[0], x.sum(1))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("%y: f32[3,3] = aten.t(%x)", r"line 2: aten\.t gives f32\[3,2\]: %y: f32\[3,3\] = "),
        ("%y: f32[3,2] = aten.turned(%x)", "line 2: there is no op aten.turned"),
        ("%y: f32[3,2] = turned(%x)", "line 2: there is no operator turned"),
        ("%y: f32[3,2] = aten.t(%z)", "line 2: %z is not defined above"),
        ("%y: f99[3,2] = input", "line 2: f99 is no dtype"),
        ("%y: f32[2,2] = aten.mm(%x, %x)", "line 2: "),
        ("%x: f32[2,3] = aten.neg(%x)", "line 2: a node can not be called x"),
        ("y = aten.t(%x)", "line 2: neither a node nor a return"),
        ("%y: f32[3,2] = aten.t", "line 2: no call"),
    ],
)
def test_text_that_is_no_graph(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_graph(f"%x: f32[2,3] = input\n{line}\nreturn (%x)\n")
