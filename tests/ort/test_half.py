"""float16 and bfloat16: each op runs and is right to the dtype, or is declined with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from graphaccel.ort.kernels import Kernels
from tests.ort.samples import CASES
from tests.ort.support import graph_of, narrow, run, why_not
from tests.support.ops.calls import Draw

aten = torch.ops.aten
# A half is right to 11 bits, a bfloat16 to 8; sums of a few terms lose two or three of them.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
HALF = (
    aten.add.Tensor,
    aten.mm.default,
    aten.addmm.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.maximum.default,
    aten.embedding_dense_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.nll_loss_backward.default,
    aten._to_copy.default,
)
DECLINED = {
    aten.maximum.default: "ONNX Runtime has no Max(float16)",
    aten.embedding_dense_backward.default: "ONNX Runtime has no ScatterND(float16, int64)",
    aten.max_pool2d_with_indices_backward.default: (
        "ONNX Runtime has no ScatterElements(float16, int64)"
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("target", HALF, ids=str)
def test_right_or_declined(target: Any, dtype: torch.dtype, kernels: Kernels) -> None:
    reasons = []

    @seed(6)
    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        args, kwargs = CASES[target](Draw(data))
        module, tensors = graph_of(target, narrow(args, dtype), narrow(kwargs, dtype))
        reason = why_not(module, kernels)
        reasons.append(reason)
        if reason is None:
            wanted = [n.meta["val"] for n in module.graph.output_node().args[0]]
            for got, true in zip(run(module, tensors, kernels), wanted, strict=True):
                assert got.dtype == true.dtype
                bound = TOLERANCE[dtype]
                torch.testing.assert_close(got, true, rtol=bound, atol=bound, equal_nan=True)

    draw()
    if dtype == torch.float16:
        assert set(reasons) == {DECLINED.get(target)}
    elif not kernels.binds(dtype):
        assert set(reasons) == {f"ONNX Runtime {kernels.version} takes no torch.bfloat16"}
    else:
        assert all(r is None or r.startswith("ONNX Runtime has no") for r in reasons)
