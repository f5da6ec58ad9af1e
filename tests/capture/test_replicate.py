"""Models of many identical layers: captured from few of them, to the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from graphaccel.capture import forward
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.layers.replicate import layered
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.capture.transport import packed, unpacked
from graphaccel.compiler.model import without_data
from graphaccel.ir.replication.layers import NotRepeated
from graphaccel.ir.replication.repeat import Pattern
from graphaccel.ir.replication.unfold import Unfolded
from graphaccel.ir.text import graph_text
from graphaccel.passes.drop_backward import drop_backward
from graphaccel.passes.fusion.fuse import fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from tests.support.gpt import GPT


def repeated(model: nn.Module, batch: Any, *, symbolic: bool = True) -> StepGraph:
    """As `graphaccel.optimize` captures a model, but from four identical layers on."""
    fake = without_data(model)
    with next(fake.parameters()).fake_mode:
        made = {name: torch.empty_like(value) for name, value in batch.items()}
    return capture(fake, flatten_call((), made), symbolic=symbolic, many=4)


def whole(model: nn.Module, batch: Any, *, symbolic: bool = True) -> StepGraph:
    return capture(model, flatten_call((), batch), symbolic=symbolic, many=None)


def assert_same(left: StepGraph, right: StepGraph) -> None:
    assert left.text() == right.text()
    assert graph_text(left.forward.graph.graph) == graph_text(right.forward.graph.graph)
    assert left.fingerprint == right.fingerprint
    for name in ("inputs", "outputs", "blocks", "positions", "sizes", "tied", "trainable"):
        assert getattr(left, name) == getattr(right, name), name
    assert left.forward.constants.keys() == right.forward.constants.keys()
    nodes = zip(left.graph.graph.nodes, right.graph.graph.nodes, strict=True)
    for a, b in nodes:
        for key in ("phase", "origin", "module", "dims", "sizes"):
            assert a.meta.get(key) == b.meta.get(key), (a.name, key)


def tokens(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 90


def test_the_same_as_all_layers_captured() -> None:
    """And so is what passes make of it before it is sharded."""
    batch = {"input_ids": tokens(4, 8), "labels": tokens(4, 8)}
    step, other = (make(GPT(layers=5, width=16), batch) for make in (repeated, whole))
    assert step.repeats is not None
    assert_same(step, other)
    rewrites = (
        (lower_precision, Plan(1, precision=PRECISIONS["bf16"])),
        (fuse, Plan(1, fusions=("bias_gelu", "linear_cross_entropy"), outputs="loss")),
        (drop_backward, Plan(1)),
    )
    for rewrite, plan in rewrites:
        made = rewrite(step, plan)
        assert made.repeats is not None, rewrite.__name__
        assert_same(made, rewrite(other, plan))


def test_a_transformers_model_with_its_cache() -> None:
    """A constant in each layer, called after it and numbered."""
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=96, num_hidden_layers=5,
    )  # fmt: skip
    batch = {"input_ids": tokens(4, 8), "labels": tokens(4, 8)}
    model = transformers.LlamaForCausalLM(config).train()
    step, other = (make(model, batch, symbolic=False) for make in (repeated, whole))
    assert step.repeats is not None
    assert step.forward.constants
    assert_same(step, other)


class Block(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    def __init__(self, layers: int, odd: str = "") -> None:
        super().__init__()
        self.odd, self.scales = odd, [1.0] * (layers - 1) + [2.0]
        self.layers = nn.ModuleList(Block(4, i) for i in range(layers))
        if odd == "tied":
            self.layers[3].up = self.layers[2].up
        if odd == "attribute":
            self.layers[2].up.extra = True
        if odd == "halves":
            for layer in self.layers[layers // 2 :]:
                layer.up = nn.Linear(4, 8, bias=False)
        if odd == "wider":
            self.layers[layers - 1].up = nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for i, layer in enumerate(self.layers):
            if self.odd == "by number" and layer.number % 4 == 3:
                x = x.sin()
            if self.odd == "by list" and self.scales[i] != 1.0:
                x = x * self.scales[i]
            if self.odd == "constant":
                x = x + torch.tensor([1.0 * layer.number])
            x = layer(x)
        if self.odd == "count":
            x = x / len(self.layers)
        if self.odd == "skips":
            x = x + self.layers[2](x)
        return {"loss": x.square().sum()}


class Two(nn.Module):
    """Layers that read what layers before them gave, each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(4, i) for i in range(5))
        self.decoder = nn.Sequential(nn.Linear(4, 4), *(Block(4, i) for i in range(6)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y) * x
        return {"loss": y.square().sum()}


def test_two_rows_of_layers() -> None:
    batch = {"x": torch.ones(4, 4)}
    step = repeated(Two(), batch)
    assert step.repeats is not None
    assert [(r.path, r.first, r.count) for r in step.repeats.runs] == [
        ("encoder", 0, 5),
        ("decoder", 1, 6),
    ]
    assert_same(step, whole(Two(), batch))


def test_rows_alone_need_no_names() -> None:
    """What a node is called with one more layer matters to graphs alone."""
    step = repeated(GPT(layers=5, width=16), {"input_ids": tokens(4, 8), "labels": tokens(4, 8)})
    few = step.repeats
    assert few is not None
    short, longer = (layered(s.graph, s.inputs, s.outputs) for s in (few.short, *few.longer))
    whole = Unfolded(Pattern(few.runs, short, [longer]))
    next(n for n in longer.graph.nodes if n.op == "call_function").name = "odd"
    with pytest.raises(NotRepeated, match="another name"):
        Pattern(few.runs, short, [longer])
    rows = Unfolded(Pattern(few.runs, short, [longer], named=False))
    for name in ("item", "copy", "reader", "source"):
        assert (getattr(rows, name) == getattr(whole, name)).all()
    assert (rows.inputs, rows.outputs) == (whole.inputs, whole.outputs)
    assert [rows.path(i) for i in range(rows.nodes)] == [whole.path(i) for i in range(whole.nodes)]


def test_few_layers_are_captured_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    export = forward.export_forward

    def counting(model: nn.Module, *rest: Any) -> Any:
        captured.append(len(model.layers))  # type: ignore[arg-type]
        return export(model, *rest)

    monkeypatch.setattr(forward, "export_forward", counting)
    for layers in (4, 60):
        captured.clear()
        step = repeated(Deep(layers), {"x": torch.randn(4, 4)})
        assert captured == [3, 3, 4]  # the second at another batch size
        assert len(step.blocks) == layers
        assert len({block.kind for block in step.blocks[1:-1]}) == 1


@pytest.mark.parametrize(
    "odd", ["tied", "attribute", "by number", "by list", "constant", "count", "skips"]
)
def test_layers_that_differ_are_all_captured(odd: str) -> None:
    """Whatever tells layers apart: their parts, or what the forward does with them."""
    batch = {"x": torch.ones(4, 4)}
    step = repeated(Deep(5, odd), batch)
    assert step.repeats is None
    assert_same(step, whole(Deep(5, odd), batch))


def test_it_travels_to_other_ranks() -> None:
    step = repeated(Deep(30), {"x": torch.ones(4, 4)})
    data = packed(step)
    other = unpacked(data)
    assert other is not None
    assert other.repeats is not None
    assert_same(step, other)
    assert len(data) < 1.2 * len(packed(repeated(Deep(6), {"x": torch.ones(4, 4)})))


@pytest.mark.parametrize(("odd", "runs"), [("wider", [(0, 9)]), ("halves", [(0, 5), (5, 5)])])
def test_a_row_with_other_layers_behind(odd: str, runs: list[tuple[int, int]]) -> None:
    batch = {"x": torch.ones(4, 4)}
    step = repeated(Deep(10, odd), batch)
    assert step.repeats is not None
    assert [(r.first, r.count) for r in step.repeats.runs] == runs
    assert_same(step, whole(Deep(10, odd), batch))
