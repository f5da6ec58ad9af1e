"""The placements of a plan are what the pass applies; edited ones too, if they are possible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.programs import Target, build, placed_programs, with_placements
from graphaccel.errors import BadPin, PlanMismatch
from graphaccel.ir.program import Sharded
from graphaccel.passes import pipeline
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.shard_axes import shard_axes
from graphaccel.planner.plan.plan import Plan
from tests.passes.captured import eager
from tests.passes.steps.test_repeat_layers import LAYERS, captured
from tests.support.lockstep import run_ranks

GOLDEN = Path(__file__).parents[2] / "golden" / "placements-gpt-block.txt"
PINNED = (("up.weight", (Sharded("tensor", 0),)), ("down.weight", (Sharded("tensor", 1),)))


class Mlp(nn.Module):
    """mean((down(tanh(up(x))) - y)²): float64 [8, 4] twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y)


@pytest.fixture(scope="module")
def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...], StepGraph, Plan]:
    torch.manual_seed(0)
    model, batch = Mlp().double(), (torch.randn(8, 4).double(), torch.randn(8, 4).double())
    step = capture(model, flatten_call(batch, {}))
    return model, batch, step, with_placements(step, Plan(2, tensor=2, batch=8, placements=PINNED))


def edited(plan: Plan, old: str, new: str) -> Plan:
    text = plan.to_json()
    assert old in text
    return Plan.from_json(text.replace(old, new))


TANH = '"tanh": "shard(1) -> shard(1)"'


def test_an_edited_placement_is_applied(
    mlp: tuple[nn.Module, tuple[torch.Tensor, ...], StepGraph, Plan],
) -> None:
    """tanh on full tensors: its argument is gathered, and the loss and gradients stay the same."""
    model, batch, step, plan = mlp
    other = edited(plan, TANH, '"tanh": "replicated -> replicated"')
    placed_programs(step, other, Target())
    shapes = []
    for each in (plan, other):
        local = shard_axes(exact_microbatch(step, each).graph, step, each)
        assert local.parameter_shards == dict(PINNED)
        (tanh,) = local.graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.tanh.default
        )
        shapes.append(tuple(tanh.meta["val"].shape))
        up, down = (parameter.detach() for parameter in model.parameters())
        parts = zip(up.chunk(2, 0), down.chunk(2, 1), strict=True)
        given = [[one.contiguous(), two.contiguous(), *batch] for one, two in parts]
        got = run_ranks(local.graph.graph, given, [{"tensor": 0}, {"tensor": 1}])
        loss, *gradients = eager(model, flatten_call(batch, {}))
        wanted = zip(*(g.chunk(2, d) for g, d in zip(gradients, (0, 1), strict=True)), strict=True)
        for (own, *parts_of), expected in zip(got, wanted, strict=True):
            torch.testing.assert_close(own, loss, rtol=1e-12, atol=1e-14)
            for mine, theirs in zip(parts_of, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert shapes == [(8, 3), (8, 6)]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (TANH, '"tanh": "shard(0) -> shard(0)"', "can not be shard(0) -> shard(0); it can be"),
        (TANH, '"tanh": "shard(1) -> partial"', "can not be shard(1) -> partial; it can be"),
        (
            TANH,
            '"tanh": "shard(1) -> shard(1); keeps 0 shard(3)"',
            "can not keep result 0 shard(3)",
        ),
        (TANH, '"tanh": "sharded"', "does not state what the call returns"),
        ('"up.weight": "shard(0)"', '"up.weight": "shard(1)"', "up.weight can not be shard(1)"),
    ],
)
def test_an_impossible_placement_is_refused(
    old: str,
    new: str,
    sentence: str,
    mlp: tuple[nn.Module, tuple[torch.Tensor, ...], StepGraph, Plan],
) -> None:
    _, _, step, plan = mlp
    with pytest.raises(BadPin) as caught:
        placed_programs(step, edited(plan, old, new), Target(), "plan.json")
    assert caught.value.pin == "axis_placements"
    assert sentence in caught.value.reason


@pytest.mark.parametrize(
    ("old", "new", "here"),
    [
        (TANH, '"tanhh": "shard(1) -> shard(1)"', "forward tanh has no placement"),
        (TANH, f'{TANH}, "sinh": "shard(1) -> shard(1)"', "there is no forward sinh"),
        (TANH, '"tanh": "shard(1), any -> shard(1)"', "forward tanh has a placement of other"),
    ],
)
def test_placements_of_another_model_are_refused(
    old: str,
    new: str,
    here: str,
    mlp: tuple[nn.Module, tuple[torch.Tensor, ...], StepGraph, Plan],
) -> None:
    _, _, step, plan = mlp
    with pytest.raises(PlanMismatch) as caught:
        placed_programs(step, edited(plan, old, new), Target(), "plan.json")
    assert str(caught.value) == (
        "error[GA204]: plan `plan.json` was made for something else\n"
        "              plan  here\n"
        f"  placements        {caught.value.differences[0][2]}\n"
        "  why:  its predictions and its stage cuts would not hold\n"
        "  help: make a new one:  graphaccel plan FILE --devices N --json plan.json\n"
        "  explain: graphaccel explain GA204"
    )
    assert caught.value.differences[0][2].startswith(here)


def test_a_pass_solves_nothing(
    mlp: tuple[nn.Module, tuple[torch.Tensor, ...], StepGraph, Plan],
) -> None:
    _, _, step, plan = mlp
    with pytest.raises(PlanMismatch, match="has no placement"):
        pipeline.build(step, replace(plan, axis_placements=()))
    assert build(step, replace(plan, axis_placements=())).parameter_shards == dict(PINNED)


def test_placements_of_one_block() -> None:
    """All equal layers but the first are one block kind, whose placements are the golden text."""
    (stated,) = with_placements(captured(LAYERS), Plan(2, tensor=2, batch=8)).axis_placements
    axis, groups = stated
    assert axis == "tensor"
    (block,) = [own for own in groups if "blocks.3" in own.names]
    assert block.blocks == (f"blocks.1-{LAYERS - 1}",)
    sections = {name: getattr(block, name) for name in ("parameters", "forward", "backward")}
    lines = [f"{name} {label}: {text}" for name, own in sections.items() for label, text in own]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()
