"""The cast of a parameter is made once a step, and microbatches read the result."""

from __future__ import annotations

import torch

from graphaccel.ir.program import StageProgram
from graphaccel.passes.parameters.cast_parameters_once import cast_parameters_once
from graphaccel.planner.plan.plan import Plan, Precision
from tests.passes.support import assert_same_results, program_of, text_of

BEFORE = """\
forward(parameter w, batch #0) -> (loss)
%w: f32[4,3] = input
%x: bf16[5,4] = input
%_to_copy: bf16[4,3] = aten._to_copy(%w, dtype=bf16)    # forward a
%mm: bf16[5,3] = aten.mm(%x, %_to_copy)    # forward a
%sum_1: bf16[] = aten.sum(%mm)    # forward
return (%sum_1)
backward first last(batch #0) -> (gradient w)
%x: bf16[5,4] = input
%ones: bf16[5,3] = aten.ones([5, 3], dtype=bf16)    # backward
%t: bf16[4,5] = aten.t(%x)    # backward a
%mm_1: bf16[4,3] = aten.mm(%t, %ones)    # backward a
%_to_copy_1: f32[4,3] = aten._to_copy(%mm_1, dtype=f32)    # backward a
return (%_to_copy_1)
"""
AFTER = """\
prepare(parameter w) -> (held w)
%w: f32[4,3] = input
%low: bf16[4,3] = aten._to_copy(%w, dtype=bf16)    # forward by cast_parameters_once
return (%low)
forward(held w, batch #0) -> (loss)
%w: bf16[4,3] = input
%x: bf16[5,4] = input
%mm: bf16[5,3] = aten.mm(%x, %w)    # forward a
%sum_1: bf16[] = aten.sum(%mm)    # forward
return (%sum_1)
backward first last(batch #0) -> (gradient w)
%x: bf16[5,4] = input
%ones: bf16[5,3] = aten.ones([5, 3], dtype=bf16)    # backward
%t: bf16[4,5] = aten.t(%x)    # backward a
%mm_1: bf16[4,3] = aten.mm(%t, %ones)    # backward a
%_to_copy_1: f32[4,3] = aten._to_copy(%mm_1, dtype=f32)    # backward a
return (%_to_copy_1)
"""


def applied(once: bool = True) -> StageProgram:
    plan = Plan(1, precision=Precision(compute="bfloat16"), cast_once=once)
    return cast_parameters_once(program_of(BEFORE), plan)


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_other_plans_cast_in_each_microbatch() -> None:
    assert text_of(applied(once=False)) == BEFORE


def test_values() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=generator)
    x = torch.randn(5, 4, generator=generator).bfloat16()
    held = {"parameter w": w, "batch #0": x}
    assert_same_results(program_of(BEFORE), applied(), held, ("loss", "gradient"))
