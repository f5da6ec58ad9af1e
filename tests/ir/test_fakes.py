"""What graphs are told of a call is what its kernel gives, in every supported version of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import has_meta_kernel
from graphaccel.ir.fakes import Fakes

Captured = Callable[[str], StepGraph]


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


def kinds(value: Any) -> list[Any]:
    """What tells results apart."""
    return [
        (one.dtype, one.device, tuple(one.shape), one.stride())
        if isinstance(one, torch.Tensor)
        else one
        for one in pytree.tree_leaves(value)
    ]


@pytest.mark.parametrize("model", ["gpt", "t5", "swin", "resnet", "mixtral"])
def test_drafts_are_told_what_fake_tensors_are(captured: Captured, model: str) -> None:
    """Where an op's own rules are asked, and where they are not."""
    fakes, alone = Fakes(), 0
    for node in captured(model).graph.graph.nodes:
        if node.op == "call_function":
            told = fakes.call(node.target, node.args, node.kwargs)
            assert kinds(told) == kinds(node.meta["val"]), node.format_node()
            alone += has_meta_kernel(node.target)
    assert alone > 20


def test_what_depends_on_values_is_refused_as_by_fake_tensors() -> None:
    fakes = Fakes()
    with fakes.mode:
        given = torch.empty(3, dtype=torch.bool)
    with pytest.raises(Exception, match="nonzero"):
        fakes.call(torch.ops.aten.nonzero.default, (given,), {})
