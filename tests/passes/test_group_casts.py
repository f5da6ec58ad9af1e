"""Casts of parameters that are held, or small, are one call."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import pytest
import torch

from graphaccel.kernels.casts import CAST_ALL
from graphaccel.passes.parameters.cast_parameters_once import cast_parameters_once
from graphaccel.passes.parameters.group_casts import group_casts
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import program_of, text_of

BEFORE = """\
forward(parameter w, parameter b, parameter big, parameter e, batch #0) -> (loss, saved t)
%w: f32[16,8] = input
%b: f32[16] = input
%big: f32[1024,1024] = input
%e: f64[16] = input
%x: bf16[32,8] = input
%_to_copy: bf16[16,8] = aten._to_copy(%w, dtype=bf16)    # forward
%t: bf16[8,16] = aten.t(%_to_copy)    # forward
%_to_copy_1: bf16[16] = aten._to_copy(%b, dtype=bf16)    # forward
%addmm: bf16[32,16] = aten.addmm(%_to_copy_1, %x, %t)    # forward
%_to_copy_2: bf16[1024,1024] = aten._to_copy(%big, dtype=bf16)    # forward
%sum_1: bf16[] = aten.sum(%_to_copy_2)    # forward
%_to_copy_3: bf16[16] = aten._to_copy(%e, dtype=bf16)    # forward
%add: bf16[16] = aten.add.Tensor(%_to_copy_3, %sum_1)    # forward
%add_1: bf16[32,16] = aten.add.Tensor(%addmm, %add)    # forward
%sum_2: bf16[] = aten.sum(%add_1)    # forward
return (%sum_2, %t)
backward first last() -> ()
return ()
"""
AFTER = """\
forward(parameter w, parameter b, parameter big, parameter e, batch #0) -> (loss, saved t)
%w: f32[16,8] = input
%b: f32[16] = input
%big: f32[1024,1024] = input
%e: f64[16] = input
%x: bf16[32,8] = input
%cast_all_default: (bf16[16,8], bf16[16]) = graphaccel.cast_all([%w, %b], bf16)    # forward by group_casts
%getitem: bf16[16,8] = getitem(%cast_all_default, 0)    # forward by group_casts
%getitem_1: bf16[16] = getitem(%cast_all_default, 1)    # forward by group_casts
%t: bf16[8,16] = aten.t(%getitem)    # forward
%addmm: bf16[32,16] = aten.addmm(%getitem_1, %x, %t)    # forward
%_to_copy_2: bf16[1024,1024] = aten._to_copy(%big, dtype=bf16)    # forward
%sum_1: bf16[] = aten.sum(%_to_copy_2)    # forward
%_to_copy_3: bf16[16] = aten._to_copy(%e, dtype=bf16)    # forward
%add: bf16[16] = aten.add.Tensor(%_to_copy_3, %sum_1)    # forward
%add_1: bf16[32,16] = aten.add.Tensor(%addmm, %add)    # forward
%sum_2: bf16[] = aten.sum(%add_1)    # forward
return (%sum_2, %t)
backward first last() -> ()
return ()
"""
PLAN = Plan(1, min_cut=True, precision=PRECISIONS["bf16"])


def test_text() -> None:
    assert text_of(group_casts(program_of(BEFORE), PLAN)) == AFTER


@pytest.mark.parametrize("plan", [Plan(1), Plan(1, min_cut=True, offload=("parameters",))])
def test_other_plans_keep_their_graphs(plan: Plan) -> None:
    assert text_of(group_casts(program_of(BEFORE), plan)) == text_of(program_of(BEFORE))


def test_values() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = ((16, 8), torch.float32), ((16,), torch.float32), ((1024, 1024), torch.float32)
    shapes = (*kinds, ((16,), torch.float64), ((32, 8), torch.bfloat16))
    given = [torch.randn(shape, generator=generator).to(kind) for shape, kind in shapes]
    wanted = program_of(BEFORE).forward(*given)
    for a, b in zip(group_casts(program_of(BEFORE), PLAN).forward(*given), wanted, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_casts_that_run_once_a_step_too() -> None:
    text = BEFORE.replace(
        "backward first last() -> ()\n", "backward first last() -> (gradient w)\n"
    )
    held = cast_parameters_once(program_of(text), Plan(1, cast_once=True, precision=PLAN.precision))
    assert held.prepare is not None
    group_casts(held, PLAN)
    calls = [n.target for n in held.prepare.graph.nodes if n.op == "call_function"]
    assert calls[0] is CAST_ALL
