"""Gradients of weights leave matmuls in float32; other casts and matmuls stay."""

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.ir.program import StageProgram
from graphaccel.passes.gradients.wide_gradients import wide_gradients
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import program_of, text_of

BEFORE = """\
forward(parameter w, batch #0) -> (loss)
%w: f32[16,8] = input
%x: bf16[32,8] = input
return (%x)
backward first last(saved x, saved g) -> (gradient w, gradient v, gradient u, gradient b)
%x: bf16[32,8] = input
%g: bf16[32,16] = input
%t: bf16[8,32] = aten.t(%x)    # backward
%mm: bf16[8,16] = aten.mm(%t, %g)    # backward a
%t_1: bf16[16,8] = aten.t(%mm)    # backward a
%_to_copy: f32[16,8] = aten._to_copy(%t_1, dtype=f32)    # backward a
%mm_1: bf16[8,16] = aten.mm(%t, %g)    # backward b
%_to_copy_1: f32[8,16] = aten._to_copy(%mm_1, dtype=f32)    # backward b
%mul: bf16[8,16] = aten.mul.Tensor(%mm_1, %mm_1)    # backward b
%_to_copy_2: f32[8,16] = aten._to_copy(%mul, dtype=f32)    # backward c
%sum_1: bf16[16] = aten.sum.dim_IntList(%g, [0])    # backward d
%_to_copy_3: f32[16] = aten._to_copy(%sum_1, dtype=f32)    # backward d
return (%_to_copy, %_to_copy_1, %_to_copy_2, %_to_copy_3)
"""
AFTER = """\
%mm: f32[8,16] = graphaccel.wide_product(%t, %g)    # backward a by wide_gradients
%t_1: f32[16,8] = aten.t(%mm)    # backward a by wide_gradients
"""


def applied() -> StageProgram:
    return wide_gradients(program_of(BEFORE), Plan(1, min_cut=True))


def test_a_product_that_is_only_a_gradient_is_float32() -> None:
    removed = "%_to_copy: f32[16,8] = aten._to_copy(%t_1, dtype=f32)    # backward a\n"
    before = text_of(program_of(BEFORE))
    start, end = before.index("%mm: "), before.index(removed)
    wanted = before[:start] + AFTER + before[end + len(removed) :]
    assert text_of(applied()) == wanted.replace("return (%_to_copy,", "return (%t_1,")


def test_plans_without_a_min_cut_keep_their_graphs() -> None:
    built = wide_gradients(program_of(BEFORE), Plan(1))
    assert text_of(built) == text_of(program_of(BEFORE))


def test_it_is_the_product_without_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(32, n, generator=generator).bfloat16() for n in (8, 16)]
    right = (given[0].double().t() @ given[1].double()).t()

    def error(program: StageProgram) -> Tensor:
        gradient = program.backwards[True, True](*given)[0]
        assert gradient.dtype == torch.float32
        return (gradient.double() - right).abs().max()

    assert error(applied()) < 1e-5 < error(program_of(BEFORE))
