"""Local sizes of the graph that is sharded to be profiled, as expressions of the batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import Sizes, node_flops, step_flops


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


def test_no_part_on_two_axes_is_taken_for_a_number_of_examples() -> None:
    """Half of 50 words is 25, and half of that 13, rounded up."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
        words = torch.zeros(8, 16, dtype=torch.int64)
    step = capture(
        model,
        flatten_call(*as_call((words, words))),
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    )
    local = sharded_graph(step, Plan(4, batch=8, tensor=2, context=2)).step

    def flops(examples: int) -> int:
        sizes = Sizes({**local.sizes, BATCH: examples})
        return sum(node_flops(node, sizes) for node in local.graph.graph.nodes)

    assert flops(32) == 4 * flops(8) > 0
