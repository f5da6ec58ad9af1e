"""Faults that a capture or a rewrite had, planted: each is found, at its node."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphaccel
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import CaptureDiffers
from graphaccel.proof.comparison import Pair, pair_of
from graphaccel.proof.first_step import prove
from tests.proof.models import (
    Net,
    Normed,
    Reverse,
    Sign,
    batch,
    hooked,
    plain_step,
    planted,
    seeded,
)

aten = torch.ops.aten


def of_plain(middle: Callable[[Net, Tensor], Tensor] | None = None) -> Pair:
    """The graph of `Net()`, beside a model that does something else in its middle."""
    step, sizes = plain_step()
    return pair_of(seeded(lambda: Net(middle)), None, step, batch(), sizes)


def found(pair: Pair) -> CaptureDiffers:
    with pytest.raises(CaptureDiffers) as caught:
        prove(pair)
    return caught.value


def test_right_captures_are_proved() -> None:
    proof = prove(of_plain())
    assert proof.text.startswith("loss and 6 gradients equal eager's (")
    assert proof.error < 1e-6


def test_backward_of_a_function_is_ignored() -> None:
    error = found(of_plain(lambda _net, x: Reverse.apply(x)))
    assert [v.split(": ")[0] for v in error.values] == [
        f"gradient of `{n}.{p}`" for n in ("first", "second") for p in ("weight", "bias")
    ]
    assert all(v.endswith("off by 2.0e+00") for v in error.values)
    assert (error.phase, error.module, error.op) == ("backward", "second", "aten.mm.default")
    assert error.location is not None
    assert error.location.file.endswith("proof/models.py")


def test_straight_through_is_ignored() -> None:
    error = found(
        planted(
            seeded(lambda: Net(lambda _net, x: x.sign())),
            seeded(lambda: Net(lambda _net, x: Sign.apply(x))),
            batch(),
        )
    )
    assert all(v.endswith("off by 1.0e+00") for v in error.values)
    assert error.phase == "backward"


def test_hook_of_an_activation_is_ignored() -> None:
    error = found(of_plain(hooked))
    assert {v.split("`")[1] for v in error.values} == {
        "first.weight", "first.bias", "second.weight", "second.bias",
    }  # fmt: skip


def test_weights_are_constants() -> None:
    def detached(net: Net, x: Tensor) -> Tensor:
        return F.linear(x, net.second.weight.detach(), net.second.bias.detach())

    def again(net: Net, x: Tensor) -> Tensor:
        return net.second(x)

    faulty, true = (seeded(lambda m=m: Net(m)) for m in (detached, again))
    error = found(planted(faulty, true, batch()))
    assert {"gradient of `second.weight`", "gradient of `second.bias`"} <= {
        v.split(": ")[0] for v in error.values
    }


def test_gradients_are_missing() -> None:
    pair = of_plain()
    kept = [o for o in pair.step.outputs if o.name != "last.bias"]
    graph = copy.deepcopy(pair.step.graph)
    results = graph.graph.output_node()
    values = zip(pair.step.outputs, results.args[0], strict=True)
    results.args = ([v for o, v in values if o.name != "last.bias"],)
    error = found(replace(pair, step=replace(pair.step, graph=graph, outputs=tuple(kept))))
    assert error.values == ("gradient of `last.bias`: graph has none",)
    assert error.node == ""


def test_a_parameter_outside_of_the_model_gets_a_gradient() -> None:
    outside = nn.Parameter(torch.ones(8))
    error = found(of_plain(lambda _net, x: x * outside))
    assert error.values == (
        "gradient of a parameter of shape [8] that is not one of the model's: graph has none",
    )


def test_an_attribute_has_another_value() -> None:
    faulty, true = (seeded(lambda: Net(lambda net, x: x * net.scale)) for _ in range(2))
    faulty.scale = 1.001
    error = found(planted(faulty, true, batch()))
    assert error.op == "aten.mul.Tensor"
    assert error.phase == "forward"


def test_dropout_is_ignored() -> None:
    error = found(of_plain(lambda _net, x: F.dropout(x, 0.5)))
    assert error.values[0].startswith("loss: ")


def test_statistics_of_a_batch_are_not_updated() -> None:
    faulty, true = (seeded(lambda t=t: Normed(t)) for t in (False, True))
    error = found(planted(faulty, true, batch(targets=False)))
    assert error.values == tuple(
        f"new value of `norm.{name}`: graph has none"
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )


def edited(edit: Callable[[StepGraph], None]) -> Pair:
    """The graph of `Net()`, rewritten as a wrong pass would."""
    pair = of_plain()
    step = replace(pair.step, graph=copy.deepcopy(pair.step.graph))
    edit(step)
    step.graph.graph.lint()
    return replace(pair, step=step)


def test_a_gradient_is_scaled() -> None:
    def scale(step: StepGraph) -> None:
        results = step.graph.graph.output_node()
        place = next(i for i, o in enumerate(step.outputs) if o.name == "first.bias")
        values = list(results.args[0])
        with step.graph.graph.inserting_before(results):
            values[place] = step.graph.graph.call_function(
                aten.mul.Tensor, (values[place], 1.01), name="scaled"
            )
        values[place].meta = {"phase": "backward", "module": "first"}
        results.args = (values,)

    error = found(edited(scale))
    assert error.values == ("gradient of `first.bias`: off by 1.0e-02",)
    assert (error.node, error.module, error.phase) == ("scaled", "first", "backward")


def test_layers_of_one_shape_are_swapped() -> None:
    step, _ = plain_step()
    names = {"p_last_bias", "p_first_bias"}
    assert names <= {n.name for n in step.graph.graph.nodes}

    faulty = seeded(Net)
    true = copy.deepcopy(faulty)
    other = nn.Linear(8, 8)
    true.third, faulty.third = other, copy.deepcopy(other)
    true.middle = lambda net, x: net.third(x)
    faulty.middle = lambda net, x: net.third(x)
    pair = planted(faulty, true, batch())
    swap = {"second": "third", "third": "second"}

    def swapped(spec):
        module, _, name = spec.name.partition(".")
        return replace(spec, name=f"{swap[module]}.{name}") if module in swap else spec

    inputs = tuple(map(swapped, pair.step.inputs))
    error = found(replace(pair, step=replace(pair.step, inputs=inputs)))
    assert error.module == "second"
    assert error.phase == "forward"


def test_a_node_that_can_not_be_run() -> None:
    def break_it(step: StepGraph) -> None:
        node = next(n for n in step.graph.graph.nodes if n.target is aten.gelu.default)
        node.target = aten.glu.default
        node.kwargs = {"dim": 7}

    error = found(edited(break_it))
    assert error.values[0].startswith("the graph can not be run: ")
    assert error.op == "aten.glu.default"


class Looked(nn.Module):
    """A table that is read at computed positions, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows.cumsum(0)).square().mean()


@pytest.mark.parametrize("bad", [0, 7])
def test_a_batch_that_eager_code_can_not_run_either(bad: int) -> None:
    """What the model itself raises is raised: in the rows of the proof, or behind them."""
    model = Looked()
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    rows = torch.zeros(8, dtype=torch.long)
    rows[bad] = 8
    with pytest.raises(IndexError, match="index out of range in self"):
        model(rows)
