"""A saved activation is copied to the host after the forward, and back for the backward."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import pytest

from graphaccel.ir.program import StageProgram
from graphaccel.passes.activations import offload_activations as module
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import (
    LINEAR,
    assert_same_results,
    held_by_linear,
    program_of,
    text_of,
)

BEFORE = LINEAR
AFTER = """\
forward(parameter w, batch #0) -> (loss, saved relu)
%w: f64[4,3] = input
%x: f64[5,4] = input
%mm: f64[5,3] = aten.mm(%x, %w)    # forward a
%relu: f64[5,3] = aten.relu(%mm)    # forward
%sum_1: f64[] = aten.sum(%relu)    # forward
%as_strided_default: f64[15] = aten.as_strided(%relu, [15], [1], 0)    # forward by offload_activations
%to_host_default: f64[15] = graphaccel.to_host(%as_strided_default)    # forward by offload_activations
return (%sum_1, %to_host_default)
backward first last(batch #0, saved relu) -> (gradient w)
%x: f64[5,4] = input
%relu: f64[15] = input
%to_device_default: f64[15] = graphaccel.to_device(%relu)    # backward by offload_activations
%as_strided_default: f64[5,3] = aten.as_strided(%to_device_default, [5, 3], [3, 1], 0)    # backward by offload_activations
%ones_like: f64[5,3] = aten.ones_like(%as_strided_default)    # backward
%threshold_backward: f64[5,3] = aten.threshold_backward(%ones_like, %as_strided_default, 0)    # backward
%t: f64[4,5] = aten.t(%x)    # backward a
%mm_1: f64[4,3] = aten.mm(%t, %threshold_backward)    # backward a
return (%mm_1)
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1)


def applied(offload: tuple[str, ...] = ("activations",)) -> StageProgram:
    return module.offload_activations(program_of(BEFORE), Plan(1, offload=offload))


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_nothing_else_is_offloaded() -> None:
    assert text_of(applied(("optimizer",))) == BEFORE


def test_values() -> None:
    kinds = ("loss", "gradient")
    assert_same_results(program_of(BEFORE), applied(), held_by_linear(), kinds)
