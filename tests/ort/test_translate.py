"""Every translated op as a region of its own, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from graphaccel.ort.kernels import Kernels
from graphaccel.ort.ops.table import TRANSLATIONS
from tests.ort.samples import CASES
from tests.ort.support import graph_of, narrow, run, why_not
from tests.support.calls import Draw

aten = torch.ops.aten
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
# Calls that are declined, by what the reason begins with; other calls of the op are not.
DECLINED = {
    aten.embedding_dense_backward.default: ("it scales by how often",),
    aten.index_put.default: ("the indexed dims are not the first",),
    aten.convolution.default: ("it is a transposed convolution",),
    aten.convolution_backward.default: ("it is a transposed", "its weight gradient is grouped"),
    aten._native_batch_norm_legit_functional.default: ("it has a tensor without elements",),
    aten.native_batch_norm_backward.default: ("it is not in training mode",),
}


def test_every_translation_has_a_case() -> None:
    assert set(CASES) == set(TRANSLATIONS)


def check(target: Any, args: Any, kwargs: Any, kernels: Kernels) -> str | None:
    """Compare; the reason where the op is declined."""
    module, tensors = graph_of(target, args, kwargs)
    reason = why_not(module, kernels)
    if reason is not None:
        return reason
    wanted = module(*tensors)
    for got, true in zip(run(module, tensors, kernels), wanted, strict=True):
        assert (got.shape, got.dtype) == (true.shape, true.dtype)
        tolerance = TOLERANCE.get(true.dtype, 0)
        torch.testing.assert_close(got, true, rtol=tolerance, atol=tolerance, equal_nan=True)
    return None


@pytest.mark.parametrize("target", TRANSLATIONS, ids=str)
def test_op(target: Any, kernels: Kernels) -> None:
    """float64 is declined where there is no kernel, and right where there is; float32 runs."""
    outcomes = []

    @seed(6)
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        args, kwargs = CASES[target](Draw(data))
        reason = check(target, args, kwargs, kernels)
        assert reason is None or "has no" in reason or reason.startswith(DECLINED[target])
        reason = check(target, narrow(args), narrow(kwargs), kernels)
        assert reason is None or reason.startswith(DECLINED[target])
        outcomes.append(reason)

    draw()
    assert None in outcomes
