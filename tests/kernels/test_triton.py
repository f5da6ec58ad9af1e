"""Triton kernels without a GPU: what they compute, by the interpreter, and what they compile to.

Two processes, as one can not both interpret and compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphaccel.kernels.ops import row_norm, softmax, softmax_dropout

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


CASES = {
    "interpreted": 326,
    "interpreted_loss": 194,
    "interpreted_pointwise": 204,
    "interpreted_softmax": 450,
    "interpreted_softmax_dropout": 206,
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_their_references_do(name: str) -> None:
    """Odd widths and rows that do not divide among programs; bf16 is left to a GPU: the interpreter
    rounds it by truncation."""
    out = run(f"tests/kernels/{name}.py", TRITON_INTERPRET="1")
    errors: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert len(errors) == CASES[name]
    for name, (error, allowed) in errors.items():
        assert error <= allowed, name


def test_kernels_compile_within_their_limits() -> None:
    """At one width, and those that keep rows whole at the widest that they are started for."""
    out = run("-m", "benchmarks.gate", "--widths", "4096", "--targets", "90")
    norms = [f"{k}{n}" for k in ("", "add_", "dropout_add_") for n in ("rms_norm", "layer_norm")]
    pairs = [*norms, "softmax", "softmax_dropout", "swiglu", "geglu", "geglu_tanh", "bias_gelu"]
    pairs += ["bias_gelu_tanh", "rotary"]
    for kernel in (*(f"{n} {way}" for n in pairs for way in ("forward", "backward")), "adamw"):
        assert kernel in out
    for way in ("forward", "backward", "in place"):
        assert f"cross_entropy {way}" in out
    compiled = set(re.findall(r"^(.+?) +90 +(\d+) ", out, re.MULTILINE))
    limits = {f"{n} forward": row_norm.WIDEST_FORWARD for n in norms}
    limits |= {f"{n} backward": row_norm.widest(n.endswith("layer_norm")) for n in norms}
    limits |= {"embedding_layer_norm forward": row_norm.WIDEST_FORWARD}
    limits |= {"softmax forward": softmax.WIDEST_FORWARD}
    limits |= {"softmax backward": softmax.WIDEST_BACKWARD}
    limits |= {"softmax_dropout forward": softmax_dropout.WIDEST_FORWARD}
    limits |= {"softmax_dropout backward": softmax.WIDEST_BACKWARD}
    for kernel, widest in limits.items():
        assert (kernel, str(widest)) in compiled
    assert "FAILS" not in out
