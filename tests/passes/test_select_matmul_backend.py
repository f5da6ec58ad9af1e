"""A large float32 matmul goes to oneDNN; a small one stays."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import pytest
import torch

from graphaccel.ir.program import StageProgram
from graphaccel.passes import select_matmul_backend as module
from tests.passes.support import program_of, text_of

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)

BEFORE = """\
forward(parameter w, batch #0) -> (loss, output)
%w: f32[128,256] = input
%x: f32[128,256] = input
%t: f32[256,128] = aten.t(%w)    # forward a
%mm: f32[128,128] = aten.mm(%x, %t)    # forward a
%slice_1: f32[4,128] = aten.slice.Tensor(%mm, 0, 0, 4)    # forward
%t_1: f32[128,4] = aten.t(%slice_1)    # forward
%mm_1: f32[4,4] = aten.mm(%slice_1, %t_1)    # forward
return (%mm, %mm_1)
backward first last() -> ()
return ()
"""
AFTER = """\
forward(parameter w, batch #0) -> (loss, output)
%w: f32[128,256] = input
%x: f32[128,256] = input
%_linear_pointwise_default: f32[128,128] = mkldnn._linear_pointwise(%x, %w, None, none, [], )    # forward a by select_matmul_backend
%slice_1: f32[4,128] = aten.slice.Tensor(%_linear_pointwise_default, 0, 0, 4)    # forward
%t_1: f32[128,4] = aten.t(%slice_1)    # forward
%mm_1: f32[4,4] = aten.mm(%slice_1, %t_1)    # forward
return (%_linear_pointwise_default, %mm_1)
backward first last() -> ()
return ()
"""


def applied(monkeypatch: pytest.MonkeyPatch, lags: bool = True) -> StageProgram:
    monkeypatch.setattr(module, "mkl_is_slow", lambda: lags)
    return module.select_matmul_backend(program_of(BEFORE))


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of(applied(monkeypatch)) == AFTER


def test_nothing_changes_where_mkl_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of(applied(monkeypatch, lags=False)) == BEFORE


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(128, 256, generator=generator) for _ in range(2)]
    wanted = program_of(BEFORE).forward(*given)
    got = applied(monkeypatch).forward(*given)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
