"""A sum over ranks is issued before the matmul that does not need it, and waited for after it."""

from __future__ import annotations

import torch

from graphaccel.ir.program import StageProgram
from graphaccel.passes.overlap_collectives import overlap_collectives
from tests.passes.support import program_of, text_of, values_of
from tests.support.lockstep import run_ranks

BEFORE = """\
forward(batch #0) -> (saved x)
%x: f64[3,3] = input
return (%x)
backward first last(saved x) -> (gradient w, sent y)
%x: f64[3,3] = input
%mm: f64[3,3] = aten.mm(%x, %x)    # backward a
%t: f64[3,3] = aten.t(%x)    # backward a
%mm_1: f64[3,3] = aten.mm(%t, %x)    # backward a
%all_reduce: f64[3,3] = _c10d_functional.all_reduce(%mm, sum, tensor)    # backward a
%wait_tensor: f64[3,3] = _c10d_functional.wait_tensor(%all_reduce)    # backward a
%mul: f64[3,3] = aten.mul.Tensor(%wait_tensor, %x)    # backward
return (%mm_1, %mul)
"""
AFTER = """\
forward(batch #0) -> (saved x)
%x: f64[3,3] = input
return (%x)
backward first last(saved x) -> (gradient w, sent y)
%x: f64[3,3] = input
%mm: f64[3,3] = aten.mm(%x, %x)    # backward a
%all_reduce: f64[3,3] = _c10d_functional.all_reduce(%mm, sum, tensor)    # backward a
%t: f64[3,3] = aten.t(%x)    # backward a
%mm_1: f64[3,3] = aten.mm(%t, %x)    # backward a
%wait_tensor: f64[3,3] = _c10d_functional.wait_tensor(%all_reduce)    # backward a
%mul: f64[3,3] = aten.mul.Tensor(%wait_tensor, %x)    # backward
return (%mm_1, %mul)
"""


def applied() -> StageProgram:
    return overlap_collectives(program_of(BEFORE))


def results(program: StageProgram) -> list[list[torch.Tensor]]:
    """Of two ranks."""
    graph = program.backwards[True, True]
    given = [values_of(graph, seed) for seed in (0, 1)]
    return run_ranks(graph.graph, given, [{"tensor": 0}, {"tensor": 1}])


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_values() -> None:
    for before, after in zip(results(program_of(BEFORE)), results(applied()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
