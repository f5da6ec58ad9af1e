"""Propagation on fake tensors: storage is shared as in a real run."""

from __future__ import annotations

import torch
from torch import fx

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir import values

aten = torch.ops.aten


def test_equal_calls_have_results_of_their_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = []
    for _ in range(3):
        product = graph.call_function(aten.mm.default, (x, x))
        made += [product, graph.call_function(aten.t.default, (product,))]
    other = graph.call_function(aten.mm.default, (x, made[1]))
    dropped = graph.call_function(aten.native_dropout.default, (x, 0.5, True))
    again = graph.call_function(aten.native_dropout.default, (x, 0.5, True))
    graph.output([*made, other, dropped, again])
    with FakeTensorMode():
        given = torch.empty(4, 4)
    values.propagate(fx.GraphModule({}, graph), [given])
    keys = [storage_key(node.meta["val"]) for node in made]
    assert keys[::2] == keys[1::2]
    assert len({*keys}) == 3
    assert other.meta["val"].shape == (4, 4)
    masks = [storage_key(t) for node in (dropped, again) for t in node.meta["val"]]
    assert len({*masks}) == 4
    assert again.meta["val"][1].dtype == torch.bool


def test_a_result_that_is_its_argument_is_not_made_anew() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    same = [graph.call_function(aten.contiguous.default, (x,)) for _ in range(2)]
    graph.output(same)
    with FakeTensorMode():
        given = torch.empty(4, 4)
    values.propagate(fx.GraphModule({}, graph), [given])
    assert [storage_key(n.meta["val"]) for n in same] == [storage_key(given)] * 2
