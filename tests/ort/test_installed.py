"""The other tests of this folder run wherever the extra can be installed."""

from __future__ import annotations

import sys

import pytest

from graphaccel.ort.kernels import installed


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the training build ends at Python 3.11")
def test_the_extra_that_the_tests_need_is_there() -> None:
    assert installed() is not None, "pip install '.[test]' brings onnxruntime-training-cpu"
