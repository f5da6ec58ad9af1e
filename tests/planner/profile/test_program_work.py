"""What the calls of a stage's program compute and move, which calibration times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.programs import build
from graphaccel.ir.program import StageProgram
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import aten, program_work


class Pooled(nn.Module):
    """The mean over the rows of an example: its gradient is a broadcast view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).mean(1)).square().mean()


class Convolved(Pooled):
    """The same after a convolution, with adaptive pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(2, 6, 3), nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pool(self.first(x)).flatten(1)).square().mean()


def stage_of(model: nn.Module, x: torch.Tensor) -> StageProgram:
    step = capture(model, flatten_call(*as_call(x)))
    return build(step, Plan(1, batch=len(x), microbatches=2)).stages[0]


@pytest.mark.parametrize(("model", "shape"), [(Pooled, (4, 5, 6)), (Convolved, (4, 2, 8, 8))])
def test_calls_that_read_broadcast_views_have_work(
    model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    stage = stage_of(model(), torch.zeros(shape))
    broadcast = 0
    for graph in (stage.forward, *stage.backwards.values()):
        for node in graph.graph.nodes:
            work = program_work(node)
            assert work is None or work.bytes > 0
            inputs = node.all_input_nodes
            views = [n for n in inputs if n.target is aten.expand.default]
            if work is not None and views:
                read = {n: n.meta["val"].nbytes for n in inputs}
                read |= {view: view.args[0].meta["val"].nbytes for view in views}
                assert work.bytes == node.meta["val"].nbytes + sum(read.values())
                broadcast += 1
    assert broadcast
