"""Calls of a joint graph that write over what exists become calls that make something new."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphaccel.capture.functional import SharedWrite, without_writes
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.ops import written_arguments

aten = torch.ops.aten


def traced(function, *values: Tensor) -> fx.GraphModule:
    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(v) for v in values))


def gates(x: Tensor, y: Tensor) -> Tensor:
    """As torch computes a cell of an LSTM."""
    a, b = torch.unsafe_chunk(x * 2, 2, 1)
    a = a.sigmoid_()
    b = b.tanh_()
    total = a * b
    total.add_(y)
    total.add_(y)
    return total.mul_(a) + total


def narrow(x: Tensor, y: Tensor) -> Tensor:
    """In place the dtype stays, whatever is added."""
    half = (x * 2).to(torch.bfloat16)
    half.mul_(y[0, 0].double())
    return half


def seen(x: Tensor, y: Tensor) -> Tensor:
    turned = (x * 2).transpose_(0, 1)
    turned.mul_(3)
    return turned.sum(1)


def test_a_write_that_nobody_reads_is_dropped() -> None:
    def unread(x: Tensor, y: Tensor) -> Tensor:
        (x * 2).transpose_(0, 1).add_(1)
        return y * 2

    graph = traced(unread, torch.randn(4, 6), torch.randn(4, 3))
    without_writes(graph)
    (call,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert [n for n in graph.graph.nodes if n.op == "call_function"] == [call]


@pytest.mark.parametrize("function", [gates, narrow, seen], ids=lambda f: f.__name__)
def test_what_is_computed_stays(function) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    graph = traced(function, x, y)
    assert any(written_arguments(n) for n in graph.graph.nodes)
    without_writes(graph)
    graph.graph.lint()
    graph.recompile()
    assert not any(written_arguments(n) for n in graph.graph.nodes)
    found, true = graph(x, y), function(x, y)
    assert found.dtype == true.dtype
    assert torch.equal(found, true)
    for node in graph.graph.nodes:
        assert node.op == "output" or "val" in node.meta


def test_random_numbers_are_the_same() -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.empty_like(x).bernoulli_(0.5).div_(0.5)

    x = torch.zeros(64)
    graph = traced(dropped, x)
    without_writes(graph)
    graph.recompile()
    torch.manual_seed(3)
    true = dropped(x)
    torch.manual_seed(3)
    assert torch.equal(graph(x), true)


def test_memory_that_others_look_at_is_refused() -> None:
    def shared(x: Tensor) -> Tensor:
        base = x * 2
        base[0].mul_(3)
        return base

    graph = traced(shared, torch.randn(2, 3))
    with pytest.raises(SharedWrite, match=r"aten\.mul_\.Tensor"):
        without_writes(graph)
