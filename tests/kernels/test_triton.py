"""Triton kernels without a GPU: what they compute, by the interpreter, and what they compile to.

Two processes, as one can not both interpret and compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("file", "cases"),
    [("interpreted.py", 286), ("interpreted_softmax.py", 450)],
    ids=["norms_and_steps", "softmax"],
)
def test_kernels_compute_what_their_references_do(file: str, cases: int) -> None:
    """Odd widths and rows that do not divide among programs; bf16 is left to a GPU: the interpreter
    rounds it by truncation."""
    out = run(f"tests/kernels/{file}", TRITON_INTERPRET="1")
    errors: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert len(errors) == cases
    for name, (error, allowed) in errors.items():
        assert error <= allowed, name


def test_kernels_compile_within_their_limits() -> None:
    out = run("-m", "benchmarks.gate", "--widths", "4096", "--targets", "90")
    for name in ("rms_norm", "layer_norm"):
        for kernel in ("", "add_", "dropout_add_"):
            assert f"{kernel}{name} forward" in out
            assert f"{kernel}{name} backward" in out
    assert "adamw" in out
    assert "softmax forward" in out
    assert "softmax backward" in out
    assert "FAILS" not in out
