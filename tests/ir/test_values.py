"""Propagation on fake tensors: equal calls run once, and storage is shared as in a real run."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir import values

aten = torch.ops.aten


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that run, from now on."""
    ran: list[str] = []
    run = fx.Interpreter.call_function

    def counted(self: fx.Interpreter, target: object, args: tuple, kwargs: dict) -> object:
        ran.append(str(target))
        return run(self, target, args, kwargs)

    monkeypatch.setattr(fx.Interpreter, "call_function", counted)
    return ran


def test_equal_calls_run_once_and_views_always(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ran = calls(monkeypatch)
    with FakeTensorMode():
        given = torch.empty(4, 4)
    values.propagate(fx.GraphModule({}, graph), [given])
    assert ran.count("aten.mm.default") == 2  # the other reads a transposed tensor
    assert ran.count("aten.native_dropout.default") == 1
    assert ran.count("aten.t.default") == 3
    keys = [storage_key(node.meta["val"]) for node in made]
    assert keys[::2] == keys[1::2]
    assert len({*keys}) == 3
    assert other.meta["val"].shape == (4, 4)
    masks = [storage_key(t) for node in (dropped, again) for t in node.meta["val"]]
    assert len({*masks}) == 4
    assert again.meta["val"][1].dtype == torch.bool


def test_a_result_that_is_its_argument_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    same = [graph.call_function(aten.contiguous.default, (x,)) for _ in range(2)]
    graph.output(same)
    with FakeTensorMode():
        given = torch.empty(4, 4)
    values.propagate(fx.GraphModule({}, graph), [given])
    assert [storage_key(n.meta["val"]) for n in same] == [storage_key(given)] * 2
