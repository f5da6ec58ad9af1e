"""ONNX Runtime is an extra: without it only `test_installed.py` is collected."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from graphaccel.ort.kernels import Kernels, installed

collect_ignore: list[str] = []
if importlib.util.find_spec("onnxruntime") is None:
    here = Path(__file__).parent
    collect_ignore = [p.name for p in here.glob("test_*.py") if p.name != "test_installed.py"]


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """What the installed build can run; it remembers what it was asked."""
    found = installed()
    assert found is not None
    return found
