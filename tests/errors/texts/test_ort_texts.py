"""The full text of every error about ONNX Runtime."""

from __future__ import annotations

import pytest

from graphaccel import errors

CASES = [
    (
        errors.OrtMissing(asked="ort='all'", reason="the package onnxruntime is not installed"),
        """\
error[GA801]: ort='all' needs ONNX Runtime, which can not be used here
  why:  the package onnxruntime is not installed
  help: install it:  pip install 'graphaccel[ort]'
  help: or do without:  ort='off'
  explain: graphaccel explain GA801""",
    ),
    (
        errors.OrtMismatch(planned="training 1.19.2", installed="plain 1.31.1"),
        """\
error[GA802]: the plan was made for ONNX Runtime training 1.19.2, and plain 1.31.1 is installed
  why:  builds have different kernels, so regions and predicted memory would differ
  help: plan again here:  graphaccel plan FILE --devices N --json plan.json
  help: or install the build of the plan:  pip install 'graphaccel[ort]'
  explain: graphaccel explain GA802""",
    ),
    (
        errors.OrtFailed(
            region="transformer.h.0 (backward)",
            action="build",
            op="aten.mm",
            path="/tmp/graphaccel_region_8c7d1f0a2b3c4d5e.onnx",
            cause="[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Failed to find kernel for FusedMatMul",
        ),
        """\
error[GA803]: ONNX Runtime failed to build the region transformer.h.0 (backward) at aten.mm
  model:     /tmp/graphaccel_region_8c7d1f0a2b3c4d5e.onnx
  reported:  [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Failed to find kernel for FusedMatMul
  why:  the region passed every check when it was placed
  help: let torch run such regions:  graphaccel.optimize(model, optimizer, fallback='fx')
  help: or run without ONNX Runtime:  ort='off'
  help: to look at the model:  netron /tmp/graphaccel_region_8c7d1f0a2b3c4d5e.onnx
  explain: graphaccel explain GA803""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda value: getattr(value, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text
