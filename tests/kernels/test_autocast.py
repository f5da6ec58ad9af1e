"""Under autocast, as `precision="bf16"` has it, fusions are found where they are in float32."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS
from benchmarks.fusions import measured
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan import Plan
from tests.kernels.test_fuse import AUTOCAST, ZOO_COUNTS, counted, fused, gradients, step_of
from tests.support.zoo import ZOO


@pytest.mark.parametrize("name", list(ZOO_COUNTS))
def test_the_models_of_the_zoo(name: str) -> None:
    model, given, _ = ZOO[name].build()
    step = capture(model, flatten_call(*as_call(given)))
    low = lower_precision(step, Plan(1, precision=AUTOCAST))
    assert counted(fused(low)) == ZOO_COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_the_committed_table_is_what_is_found(name: str) -> None:
    """benchmarks/results/fusions.json, which docs/fusions.md shows: counts and bytes of a row."""
    rows = json.loads((RESULTS / "fusions.json").read_text())["rows"]
    (row,) = (r for r in rows if (r["model"], r["form"]) == (name, "autocast"))
    assert measured(name, row["attention"], "autocast") == row
    assert row["bytes_floor"] < row["bytes_after"] < 0.7 * row["bytes_before"]


class Turned(nn.Module):
    """Two projections turned by tables in float32: `forward(x)`, x [B, S, 16] → scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10 ** torch.arange(8) * 1.0
        angles = torch.cat((angles, angles), -1).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()

        def turn(y: Tensor) -> Tensor:
            return y * cos + torch.cat((-y[..., 8:], y[..., :8]), -1) * sin

        return (turn(self.query(x)) * turn(self.key(x))).sum(-1).tanh().sum()


def test_rotary_by_wide_tables_is_no_worse_than_eager() -> None:
    torch.manual_seed(4)
    model, x = Turned(), torch.randn(3, 5, 16)
    step = lower_precision(step_of(model, x), Plan(1, precision=AUTOCAST))
    rewritten = fused(step, "rotary")
    assert counted(rewritten) == {"rotary": 2}
    eager, ours = gradients(step, model, (x,)), gradients(rewritten, model, (x,))
    assert [v.dtype for v in ours] == [v.dtype for v in eager]
    wide = copy.deepcopy(model).double()
    true = gradients(step_of(wide, x.double()), wide, (x.double(),))
    assert len(true) == len(ours) == len(eager)
    for a, b, t in zip(eager, ours, true, strict=True):
        unit = torch.finfo(torch.bfloat16).eps * t.abs().max()
        assert (b.double() - t).abs().max() <= 2 * (a.double() - t).abs().max() + unit
