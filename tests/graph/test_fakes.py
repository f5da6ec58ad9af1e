"""What graphs are told of a call is what its kernel gives, in every supported version of torch."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import graphaccel.compat.torch  # noqa: F401  (it corrects them)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_on_cpus_is_told_as_it_is(dtype: torch.dtype, pre_dispatch: bool) -> None:
    """Of the sums that its backward reads, too: torch before 2.13 tells them in float32."""

    def attend(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(*given)

    def laid_out(tensors: tuple[torch.Tensor, ...]) -> list[tuple]:
        return [(t.dtype, t.shape, t.stride()) for t in tensors]

    given = [torch.ones(2, n, 3, 8, dtype=dtype).transpose(1, 2) for n in (5, 7, 7)]
    traced = make_fx(attend, tracing_mode="fake", pre_dispatch=pre_dispatch)(*given)
    (call,) = (n for n in traced.graph.nodes if "attention" in n.name)
    assert laid_out(call.meta["val"]) == laid_out(attend(*given))
