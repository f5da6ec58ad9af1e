"""What a capture says about its nodes, and which models and calls it takes."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.capture.symbols import BATCH, SEQUENCE, evaluate
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.planner.cluster.catalogue import cluster
from tests.support.zoo import ZOO

Captured = Callable[[str], StepGraph]

TEXT = """
from tests.capture.test_stepgraph import described
print(described())
"""


def described() -> str:
    """The digests of the text and of the graph of a capture in this process."""
    model, batch, loss_fn = ZOO["gpt"].build()
    step = capture(model, flatten_call(*as_call(batch)), loss_fn)
    return f"{hashlib.sha256(step.text().encode()).hexdigest()} {step.fingerprint}"


def test_the_text_is_the_same_in_two_processes() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}  # no order of a set counts
    command = [sys.executable, "-c", TEXT]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == described()


@pytest.mark.parametrize("name", ZOO)
def test_nodes_say_where_they_come_from(name: str, captured: Captured) -> None:
    nodes = [n for n in captured(name).graph.graph.nodes if n.op == "call_function"]
    for phase in ("forward", "backward"):
        those = [n for n in nodes if n.meta["phase"] == phase]
        with_module = sum(bool(n.meta.get("module")) for n in those)
        with_origin = sum(bool(n.meta.get("origin")) for n in those)
        with_line = sum(n.meta.get("location") is not None for n in those)
        # What the model's own forward computes (often its loss) has the empty path.
        assert with_module >= 0.9 * len(those), f"{phase}: {with_module} of {len(those)} modules"
        assert with_origin >= 0.95 * len(those), f"{phase}: {with_origin} of {len(those)} origins"
        assert with_line >= 0.95 * len(those), f"{phase}: {with_line} of {len(those)} lines"


@pytest.mark.parametrize("sizes", [{BATCH: 12}, {BATCH: 2}, {SEQUENCE: 10}], ids=str)
def test_sizes_hold_at_other_sizes(sizes: dict[Any, int], captured: Captured) -> None:
    """Expressions evaluated elsewhere are what a capture there finds."""
    step = captured("gpt")
    model, batch, loss_fn = ZOO["gpt"].build()
    count, length = sizes.get(BATCH, 8), sizes.get(SEQUENCE, 16)
    rows = torch.arange(count) % 8
    other = {name: value[rows][:, :length].contiguous() for name, value in batch.items()}
    fresh = capture(model, flatten_call((), other), loss_fn, symbolic=False)
    at = {**step.sizes, **sizes}
    pairs = zip(step.graph.graph.nodes, fresh.graph.graph.nodes, strict=True)
    for node, twin in pairs:
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert tuple(evaluate(d, at) for d in node.meta["dims"]) == tuple(
                twin.meta["val"].shape
            )


def names(step: StepGraph, kind: str) -> list[str]:
    return [o.name for o in step.outputs if o.kind == kind]


def test_tied_weights_have_one_gradient(captured: Captured) -> None:
    step = captured("gpt")
    assert step.tied
    gradients = names(step, "gradient")
    assert len(gradients) == len(set(gradients))
    for other, stands in step.tied.items():
        assert other not in gradients
        assert stands in gradients


def test_changed_buffers_are_outputs(captured: Captured) -> None:
    step = captured("resnet")
    buffers = names(step, "buffer")
    model, _, _ = ZOO["resnet"].build()
    assert sorted(buffers) == sorted(n for n, _ in model.named_buffers())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(
        self, pair: dict[str, Any], *, target: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        out = self.left(pair["left"]) + self.right(pair["deep"][0])
        return {"loss": (out - target[0]).square().mean(), "out": out}


def test_nested_inputs_and_keywords() -> None:
    call = {"left": torch.randn(4, 3), "deep": (torch.randn(4, 4),)}
    step = capture(Nested(), flatten_call((call,), {"target": [torch.randn(4, 2)]}))
    assert {i.name for i in step.inputs if i.kind == "batch"} == {
        "args[0]['left']",
        "args[0]['deep'][0]",
        "target[0]",
    }
    assert names(step, "gradient") == ["left.weight", "left.bias", "right.weight", "right.bias"]
    assert [o.kind for o in step.outputs].count("loss") == 1
    assert step.batch_size == 4


def test_inputs_that_are_one_tensor_stay_two() -> None:
    model, batch, _ = ZOO["gpt"].build()
    ids = batch["input_ids"]
    step = capture(model, flatten_call((), {"input_ids": ids, "labels": ids}))
    used = {
        s.name: bool(n.users)
        for n, s in zip(step.graph.graph.nodes, step.inputs, strict=False)
        if s.kind == "batch"
    }
    assert used == {"input_ids": True, "labels": True}


class Recurrent(nn.Module):
    """Two layers of an LSTM that read the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_of_an_lstm_is_the_ops_of_its_cells(training: bool) -> None:
    """On a CPU with oneDNN too: its one op keeps a workspace for the backward."""
    for name in ("cpu", "h100-80gb"):
        compiler = Compiler(Model(Recurrent(), None, 2.0), cluster(name, 1), {})
        batch = as_batch((torch.randn(4, 6, 8),))
        step, _ = compiler.captures.of(batch, training=training)
        found = {str(n.target) for n in step.graph.graph.nodes if n.op == "call_function"}
        assert "aten.sigmoid.default" in found
        assert not any("lstm" in target or "rnn" in target for target in found)


def test_an_lstm_in_float32_trains_as_in_eager() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    eager = Recurrent()
    planned = copy.deepcopy(eager)
    graphaccel.optimize(planned, devices=1)
    enabled = torch.backends.mkldnn.enabled
    for model in (eager, planned):
        loss = model(x)
        loss.backward()
    assert torch.backends.mkldnn.enabled == enabled
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(planned.get_parameter(name).grad, parameter.grad)
