"""What graphs are told of a call is what its kernel gives, in every supported version of torch."""

from __future__ import annotations

import pytest
import torch

from graphaccel.compat.torch import FakeTensorMode


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_on_cpus_is_told_as_it_is(dtype: torch.dtype) -> None:
    """Of the sums that its backward reads, too: torch before 2.13 tells them in float32."""

    def attend() -> list[tuple]:
        query, key, value = (torch.ones(2, n, 3, 8, dtype=dtype).transpose(1, 2) for n in (5, 7, 7))
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return [(t.dtype, t.shape, t.stride()) for t in call(query, key, value)]

    with FakeTensorMode():
        told = attend()
    assert told == attend()
