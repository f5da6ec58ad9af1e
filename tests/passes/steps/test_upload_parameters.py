"""Programs that copy parameters up from the host: when, and how much of them is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import tensor_bytes
from graphaccel.compiler.programs import build
from graphaccel.ir.text import graph_text
from graphaccel.kernels.host_copy import AHEAD
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import is_view
from tests.planner.estimate.test_parameter_prefetch import BLOCK, BOTH, Blocks

Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def three_blocks() -> StepGraph:
    """Its step, of four rows."""
    return capture(Blocks(), flatten_call((torch.zeros(4, 8),), {}))


def _copied_up(graph: fx.GraphModule) -> list[int]:
    """Bytes of what was copied up at each node of a program's graph."""
    nodes = list(graph.graph.nodes)
    found = [0] * len(nodes)
    for at, node in enumerate(nodes):
        if node.target is AHEAD:
            showing, last = [node], at
            for other in showing:
                last = max(last, *map(nodes.index, other.users))
                sent = "all_gather" in str(other.target)
                showing += [u for u in other.users if sent or is_view(u) or "all_gather" in str(u)]
            for there in range(at, last + 1):
                found[there] += tensor_bytes(node.meta["val"])
    return found


def test_programs_have_as_much_there(three_blocks: StepGraph) -> None:
    """No backward holds on to what the forward was given, and casts do not either."""
    (stage,) = build(three_blocks, Plan(1, batch=4, offload=BOTH)).stages
    for graph in (stage.forward, stage.backwards[True, True]):
        there = _copied_up(graph)
        assert BLOCK < max(there) <= 2 * BLOCK
        assert there[-1] <= BLOCK
    plan = Plan(2, data=2, batch=4, zero=3, offload=BOTH)
    (stage,) = build(three_blocks, plan).stages
    there = _copied_up(stage.forward)
    assert max(there) == 3 * BLOCK // 2  # of one that is being gathered, and of the next two
    assert there[-1] == 0


def test_programs_copy_a_block_ahead(golden: Golden, three_blocks: StepGraph) -> None:
    """Whole parameters, and the shards of groups, before they are gathered."""
    plans = Plan(1, batch=4), Plan(2, data=2, batch=4, zero=3)
    texts = []
    for plan in plans:
        (stage,) = build(three_blocks, replace(plan, offload=BOTH)).stages
        texts += [graph_text(g.graph) for g in (stage.forward, stage.backwards[True, True])]
    headings = "forward", "backward", "zero 3, forward", "zero 3, backward"
    said = (f"{heading}\n{text}" for heading, text in zip(headings, texts, strict=True))
    golden("pass-upload", "\n".join(said))
