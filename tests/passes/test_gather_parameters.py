"""A parameter that is held in shards is gathered before its use."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch

from graphaccel.ir.program import Owned, Sharded, StageProgram
from graphaccel.passes.parameters.gather_parameters import gather_parameters
from graphaccel.passes.parameters.parameter_groups import ShardedParameters
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import LINEAR, held_by_linear, program_of, text_of
from tests.support.lockstep import run_ranks

BEFORE = LINEAR
AFTER = """\
forward(batch #0, shards w) -> (loss, saved relu)
%x: f64[5,4] = input
%shards_0: f64[6] = input
%all_gather_into_tensor_default: f64[12] = _c10d_functional.all_gather_into_tensor(%shards_0, 2, data)    # forward a by gather_parameters
%wait_tensor_default: f64[12] = _c10d_functional.wait_tensor(%all_gather_into_tensor_default)    # forward a by gather_parameters
%view_default: f64[4,3] = aten.view(%wait_tensor_default, [4, 3])    # forward a by gather_parameters
%mm: f64[5,3] = aten.mm(%x, %view_default)    # forward a
%relu: f64[5,3] = aten.relu(%mm)    # forward
%sum_1: f64[] = aten.sum(%relu)    # forward
return (%sum_1, %relu)
backward first last(batch #0, saved relu) -> (gradient w)
%x: f64[5,4] = input
%relu: f64[5,3] = input
%ones_like: f64[5,3] = aten.ones_like(%relu)    # backward
%threshold_backward: f64[5,3] = aten.threshold_backward(%ones_like, %relu, 0)    # backward
%t: f64[4,5] = aten.t(%x)    # backward a
%mm_1: f64[4,3] = aten.mm(%t, %threshold_backward)    # backward a
return (%mm_1)
"""


def applied(level: int = 3) -> StageProgram:
    program = program_of(BEFORE)
    (w, _) = program.forward.graph.find_nodes(op="placeholder")
    owned = {"w": Owned(level, Sharded("data", 0))}
    plan = Plan(2, data=2, zero=level, batch=10)
    return gather_parameters(program, plan, ShardedParameters(owned, 2, {"w": w.meta["val"]}))


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_zero_2_gathers_nothing() -> None:
    assert text_of(applied(2)) == BEFORE


def test_values() -> None:
    """Of two ranks with a batch each."""
    w, x = held_by_linear().values()
    batches = [x, x + 1.0]
    after = applied()
    assert [value.kind for value in after.forward_inputs] == ["batch", "shards"]
    given = [[x, part.flatten()] for x, part in zip(batches, w.chunk(2), strict=True)]
    got = run_ranks(after.forward.graph, given, [{"data": 0}, {"data": 1}])
    for results, batch in zip(got, batches, strict=True):
        wanted = program_of(BEFORE).forward(w, batch)
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
