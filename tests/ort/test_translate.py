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
from tests.support.ops.calls import Draw

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
    aten.max_pool2d_with_indices.default: ("it has no batch",),
}


def test_every_translation_has_a_case() -> None:
    assert set(CASES) == set(TRANSLATIONS)


def check(target: Any, args: Any, kwargs: Any, kernels: Kernels) -> str | None:
    """Compare; the reason where the op is declined."""
    module, tensors = graph_of(target, args, kwargs)
    reason = why_not(module, kernels)
    if reason is not None:
        return reason
    wanted = [n.meta["val"] for n in module.graph.output_node().args[0]]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention_with_masked_keys_and_a_row_without_any(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(2, 2, 3, 4, dtype=dtype) for _ in range(4))
    mask = torch.zeros(2, 1, 3, 3, dtype=dtype)
    mask[0, :, 1, 2] = mask[1, :, 0] = -torch.inf
    mask[0, :, 0, 1] = torch.finfo(dtype).min
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, total = forward(q, k, v, 0.0, False, attn_mask=mask)
    given = (grad, q, k, v, out, total, 0.0, False)
    settings = {"attn_mask": mask}
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert check(forward.default, (q, k, v, 0.0, False), settings, kernels) is None
    assert check(backward, given, settings, kernels) is None
