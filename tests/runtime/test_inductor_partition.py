"""Layers that are alike are pieces of their own, and are compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import graphaccel
from graphaccel.runtime.inductor import compile as inductor
from graphaccel.runtime.inductor.partition import Piece, notes, pieces, signature
from tests.runtime.test_inductor import Run, plainly, stage_of
from tests.support.gpt import GPT

aten = torch.ops.aten


def gpt(layers: int) -> GPT:
    torch.manual_seed(3)
    model = GPT(layers=layers, width=16, heads=2, context=8, vocabulary=48, deviation=0.15)
    return model.double()


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(48, (4, 8), generator=torch.Generator().manual_seed(2))
    return ids, ids


def compiled(layers: int, monkeypatch: pytest.MonkeyPatch, **pins: Any) -> tuple[int, GPT, GPT]:
    """How many codes are made for a model; it and its twin without them, after a backward."""
    made: list[Run] = []

    def noted(module: fx.GraphModule, inputs: Sequence[Tensor], settings: Any) -> Run:
        made.append(plainly(module, inputs, settings))
        return made[-1]

    monkeypatch.setattr(inductor, "compile_graph", noted)
    plain, planned = gpt(layers), gpt(layers)
    for model, kind in ((plain, "off"), (planned, "inductor")):
        graphaccel.optimize(model, devices=1, compile=kind, recompute="none", **pins)
        model(*tokens()).backward()
    return len(made), plain, planned


@pytest.mark.release
@pytest.mark.parametrize("microbatches", [1, 2])
def test_more_layers_are_no_more_to_compile(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, _, _ = compiled(5, monkeypatch, microbatches=microbatches)
    more, plain, planned = compiled(7, monkeypatch, microbatches=microbatches)
    assert more == few
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    program = planned.graphaccel.program
    graphs = [g for p in program.stages for g in (p.forward, *p.backwards.values())]
    found = [p for g in graphs for p in pieces(g.graph) if p.compiled]
    assert len({signature(p) for p in found}) == more < len(found) - 6
    assert "of them unlike)" in notes(program)[0]


def test_few_layers_are_left_whole() -> None:
    graph = stage_of(gpt(3), tokens()).forward.graph
    assert [p.compiled for p in pieces(graph)] == [True]


def one(target: Any, *args: Any, dtype: torch.dtype = torch.float32, size: int = 4) -> Piece:
    """A piece of two calls: `target(x, *args)` and its relu."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(size, dtype=dtype, device="meta")
    y = graph.call_function(target, (x, *args))
    z = graph.call_function(aten.relu.default, (y,))
    for node in (y, z):
        node.meta["val"] = x.meta["val"]
    graph.output([z])
    (piece,) = pieces(graph)
    return piece


def test_what_makes_pieces_unlike() -> None:
    add = aten.add.Scalar
    base = signature(one(add, 1))
    assert signature(one(add, 1)) == base
    for other in (
        one(add, 1.0),
        one(add, True),
        one(add, 2),
        one(aten.mul.Scalar, 1),
        one(add, 1, dtype=torch.float64),
        one(add, 1, size=5),
    ):
        assert signature(other) != base
    twice = one(add, 1)
    assert signature(Piece(twice.nodes, True, twice.inputs, twice.nodes)) != base
