"""Whole models, forward and backward, on ONNX Runtime."""

from __future__ import annotations

import pytest

from tests.ort.models import MODELS, run_model, sizes_of_batches
from tests.support.parity import compare, reference, run_plan
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("name", MODELS)
def test_float32(pool: Pool, name: str) -> None:
    (found,) = pool.run(1, run_model, name, "float32")
    assert found["loss"] <= 1e-5
    assert found["gradient"] <= 1e-5
    assert found["coverage"] >= 0.95
    assert found["sessions"] == found["distinct"] < found["regions"]


@pytest.mark.parametrize("name", MODELS)
def test_float64(pool: Pool, name: str) -> None:
    (found,) = pool.run(1, run_model, name, "float64")
    assert found["loss"] <= 1e-10
    assert found["gradient"] <= 1e-10
    assert found["coverage"] >= 0.95
    missing = {"aten.gelu", "aten.gelu_backward", "aten.convolution", "aten.convolution_backward"}
    assert {op for op, _ in found["declined"]} <= missing


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("gpt2", {"pipeline": 2, "data": 1, "microbatches": 4}),
        ("gpt2", {"tensor": 2}),
        ("bert", {"data": 2, "microbatches": 2}),
    ],
    ids=str,
)
def test_under_a_plan(pool: Pool, name: str, pins: dict[str, int]) -> None:
    pins = {**pins, "ort": "all"}
    got = pool.run(2, run_plan, name, "float64", pins, 2)
    compare(reference(name, "float64", 2), got).check(1e-10, 1e-10)


def test_batches_of_other_sizes_share_their_sessions(pool: Pool) -> None:
    (found,) = pool.run(1, sizes_of_batches)
    assert max(found["errors"]) <= 1e-10
    first, second, third, fourth = found["sessions"]
    assert first < second == third == fourth
