"""Models of identical layers that do not fit: a few layers are compared, the others are copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import CaptureDiffers
from graphaccel.proof import first_step
from graphaccel.proof.comparison import Pair, pair_of
from graphaccel.proof.first_step import prove
from tests.proof.models import DEEP, Deep, Net, Reverse, batch, deep_step, plain_step, seeded

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for a model of which other weights are held already, not for a full one."""
    room = lambda _model, _device, held: 1e9 if held else 0.0  # noqa: E731
    monkeypatch.setattr(first_step, "free_memory", room)


def deep(model: nn.Module | None = None) -> Pair:
    """The graph of `Deep()` beside a model."""
    step, sizes = deep_step()
    return pair_of(model or seeded(Deep), None, step, batch(), sizes)


def test_a_few_layers_are_compared_for_all() -> None:
    made = prove(deep())
    assert made.proved
    assert made.text.startswith(
        f"block by block, {DEEP} layers: loss and 12 gradients equal eager's ("
    )


def test_without_identical_layers_nothing_is_proved() -> None:
    step, sizes = plain_step()
    made = prove(pair_of(seeded(Net), None, step, batch(), sizes))
    assert made.text == (
        "not enough memory for eager and the graph on a few rows, and its graph was not captured "
        "from few of many identical layers"
    )


def test_memory_for_a_few_layers_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "free_memory", lambda *_: 0.0)
    made = prove(deep())
    assert not made.proved
    assert made.text == "not enough memory for eager and the graph on a few rows of a few layers"


def refused(pair: Pair) -> CaptureDiffers:
    with pytest.raises(CaptureDiffers) as caught:
        prove(pair)
    return caught.value


def test_a_gradient_that_the_capture_ignores_is_found_in_a_block() -> None:
    model = seeded(Deep)
    for layer in model.layers:
        layer.middle = Reverse.apply
    error = refused(deep(model))
    assert error.values[0].startswith("gradient of `first.weight`: off by ")
    assert error.values[-1] == f"in the model with 4 of its {DEEP} layers"
    assert error.phase == "backward"


def edited(edit: Callable[[StepGraph, fx.Graph], StepGraph | None]) -> CaptureDiffers:
    """What is said of the graph of `Deep()` with a fault in one of its layers."""
    pair = deep()
    step = replace(pair.step, graph=copy.deepcopy(pair.step.graph))
    step = edit(step, step.graph.graph) or step
    step.graph.graph.lint()
    return refused(replace(pair, step=step))


def named(graph: fx.Graph, layer: int, target: Any, phase: str = "forward") -> fx.Node:
    """The first call of an op in a layer."""
    return next(
        node
        for node in graph.nodes
        if node.target is target
        and node.meta.get("module", "").startswith(f"layers.{layer}")
        and node.meta.get("phase") == phase
    )


def test_another_op_in_one_layer_is_found() -> None:
    def edit(_step: StepGraph, graph: fx.Graph) -> None:
        named(graph, 5, aten.gelu.default).target = aten.relu.default

    error = edited(edit)
    assert (error.module, error.op, error.phase) == ("layers.5", "aten.relu.default", "forward")
    assert "is not what the layers that were compared have in its place" in error.values[0]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_argument_from_another_layer_is_found(phase: str) -> None:
    target = aten.gelu.default if phase == "forward" else aten.gelu_backward.default

    def edit(_step: StepGraph, graph: fx.Graph) -> None:
        node, other = named(graph, 5, target, phase), named(graph, 3, aten.gelu.default)
        place = len(node.all_input_nodes) - 1
        node.args = (*node.args[:place], other.args[0], *node.args[place + 1 :])

    assert edited(edit).module == "layers.5"


def test_parameters_of_two_layers_in_each_others_place_are_found() -> None:
    swap = {"layers.4.linear.weight": "layers.5.linear.weight"}
    swap |= {other: one for one, other in swap.items()}

    def edit(step: StepGraph, _graph: fx.Graph) -> StepGraph:
        inputs = (replace(spec, name=swap.get(spec.name, spec.name)) for spec in step.inputs)
        return replace(step, inputs=tuple(inputs))

    assert "in `layers.4.linear." in edited(edit).values[0]


def test_gradients_of_two_layers_in_each_others_place_are_found() -> None:
    def edit(step: StepGraph, graph: fx.Graph) -> None:
        results = graph.output_node()
        values = list(results.args[0])
        one, other = (
            next(i for i, o in enumerate(step.outputs) if o.name == f"layers.{n}.linear.bias")
            for n in (2, 6)
        )
        values[one], values[other] = values[other], values[one]
        results.args = (values,)

    assert edited(edit).values[0].startswith("`layers.")
