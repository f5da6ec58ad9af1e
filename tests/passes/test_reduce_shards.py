"""A gradient that is kept in shards is written into a flat buffer and reduce-scattered."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch

from graphaccel.ir.program import Owned, Sharded, StageProgram
from graphaccel.passes.gradients.reduce_shards import reduce_shards
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import LINEAR, program_of, text_of, values_of
from tests.support.lockstep import run_ranks

BEFORE = LINEAR.replace("-> (gradient w)", "-> (shard w)")
AFTER = LINEAR.replace("-> (gradient w)", "-> (carried w)").replace(
    "return (%mm_1)\n",
    """\
%empty_memory_format: f64[12] = aten.empty.memory_format([12], dtype=f64, device=cpu)    # backward a by reduce_shards
%view_default: f64[2,6] = aten.view(%empty_memory_format, [2, 6])    # backward a by reduce_shards
%narrow_default: f64[2,6] = aten.narrow(%view_default, 1, 0, 6)    # backward a by reduce_shards
%view_default_1: f64[2,2,3] = aten.view(%narrow_default, [2, 2, 3])    # backward a by reduce_shards
%view_default_2: f64[2,2,3] = aten.view(%mm_1, [2, 2, 3])    # backward a by reduce_shards
%copy__default: f64[2,2,3] = aten.copy_(%view_default_1, %view_default_2)    # backward a by reduce_shards
%reduce_scatter_tensor_default: f64[6] = _c10d_functional.reduce_scatter_tensor(%empty_memory_format, sum, 2, data)    # backward a by reduce_shards
%wait_tensor_default: f64[6] = _c10d_functional.wait_tensor(%reduce_scatter_tensor_default)    # backward a by reduce_shards
return (%wait_tensor_default)
""",
)


def applied(text: str = BEFORE) -> StageProgram:
    plan = Plan(2, data=2, zero=2, batch=10)
    return reduce_shards(program_of(text), plan, {"w": Owned(2, Sharded("data", 0))})


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_whole_gradients_stay() -> None:
    assert text_of(applied(LINEAR)) == LINEAR


def test_values() -> None:
    """Each of two ranks has its rows of the sum of both gradients."""
    whole = program_of(BEFORE).backwards[True, True]
    given = [values_of(whole, seed) for seed in (0, 1)]
    total = torch.stack([whole(*each)[0] for each in given]).sum(0)
    graph = applied().backwards[True, True].graph
    got = run_ranks(graph, given, [{"data": 0}, {"data": 1}])
    for (shard,), rows in zip(got, total.chunk(2), strict=True):
        torch.testing.assert_close(shard, rows.flatten(), rtol=1e-12, atol=1e-12)
