"""Local sizes of the graph that is sharded to be profiled, as expressions of the batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import Sizes, step_flops


@pytest.mark.parametrize(
    "widths",
    [
        (2 * 13 * 17, 2 * 19 * 23, 2 * 29 * 31, 2 * 37 * 43, 2 * 41 * 47, 4096),  # small primes
        (20, 25, 44, 50, 60),  # half of 25 is 13, rounded up
    ],
)
def test_no_width_is_taken_for_a_number_of_examples(widths: tuple[int, ...]) -> None:
    pairs = pairwise(widths)
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs]
        batch = torch.zeros(8, widths[0])
    call = flatten_call(*as_call(batch))
    step = capture(nn.Sequential(*layers), call, lambda out: out.sum())
    local = sharded_graph(step, Plan(2, batch=8, tensor=2)).step

    def flops(examples: int) -> int:
        return Sizes({**local.sizes, BATCH: examples})(step_flops(local.graph.graph))

    assert flops(32) == 4 * flops(8) > 0
    for node in local.graph.graph.nodes:
        if node.op == "placeholder" and node.target.startswith("p_"):
            assert all(isinstance(size, int) for size in node.meta["dims"]), node
