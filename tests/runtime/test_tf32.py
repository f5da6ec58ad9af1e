"""Products that round what they read: set for the step, and for nothing else."""

from __future__ import annotations

import pytest
import torch

from graphaccel.runtime.tf32 import rounding

SETTINGS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)


def test_the_setting_is_the_process_own_again_behind_a_step() -> None:
    before = [setting.fp32_precision for setting in SETTINGS]

    def fail() -> None:
        with rounding("tfloat32"):
            assert [setting.fp32_precision for setting in SETTINGS] == ["tf32", "tf32"]
            raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        fail()
    assert [setting.fp32_precision for setting in SETTINGS] == before
    with rounding(""):
        assert [setting.fp32_precision for setting in SETTINGS] == before
