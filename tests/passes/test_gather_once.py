"""A parameter that is held in shards is gathered once a step, and microbatches read the result."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch

from graphaccel.ir.program import Owned, Sharded, StageProgram
from graphaccel.passes.parameters.gather_once import gather_once
from graphaccel.passes.parameters.parameter_groups import ShardedParameters
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import LINEAR, held_by_linear, program_of, text_of
from tests.support.lockstep import run_ranks

BEFORE = LINEAR
AFTER = """\
prepare(shards w) -> (held w)
%shards_0: f64[6] = input
%narrow_default: f64[6] = aten.narrow(%shards_0, 0, 0, 6)    # forward by gather_once
%view_default: f64[2,3] = aten.view(%narrow_default, [2, 3])    # forward by gather_once
%all_gather_into_tensor_coalesced_default: (f64[4,3]) = _c10d_functional.all_gather_into_tensor_coalesced([%view_default], 2, data)    # forward by gather_once
%whole: f64[4,3] = getitem(%all_gather_into_tensor_coalesced_default, 0)    # forward by gather_once
return (%whole)
forward(held w, batch #0) -> (loss, saved relu)
%w: f64[4,3] = input
%x: f64[5,4] = input
%wait_tensor_default: f64[4,3] = _c10d_functional.wait_tensor(%w)    # forward a by gather_once
%mm: f64[5,3] = aten.mm(%x, %wait_tensor_default)    # forward a
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
    return gather_once(program, plan, ShardedParameters(owned, 2, {"w": w.meta["val"]}))


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_zero_2_holds_nothing() -> None:
    assert text_of(applied(2)) == BEFORE


def test_values() -> None:
    """Of a microbatch, which reads the whole parameter."""
    w, x = held_by_linear().values()
    after = applied()
    assert [value.kind for value in after.forward_inputs] == ["held", "batch"]
    (got,) = run_ranks(after.forward.graph, [[w, x]], [{"data": 0}])
    wanted = program_of(BEFORE).forward(w, x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
