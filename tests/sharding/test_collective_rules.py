"""Collectives of one axis keep the shards that another axis has along the dim they move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from graphaccel.kernels.ops.experts import GRADIENT, GROUPED_MATMUL
from graphaccel.planner.profile.cost import Sizes, node_work
from graphaccel.sharding.rules.shard import Shard
from graphaccel.sharding.rules.strategies import rows_of

_c10d = torch.ops._c10d_functional
OTHERS, RANKS = 3, 2  # of the axis over which they move, and of the axis that is looked at


def _call(target: object, *args: object) -> fx.Node:
    graph = fx.Graph()
    given = []
    for value in args:
        node = graph.placeholder(f"x{len(given)}") if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            node.meta["val"], node.meta["dims"] = value, tuple(value.shape)
        given.append(node)
    node = graph.call_function(target, tuple(given))
    return node


def _part(whole: Tensor, shard: Shard, rank: int) -> Tensor:
    size = whole.shape[0] // (shard.outer * RANKS)
    seen = whole.reshape(shard.outer, RANKS, size, *whole.shape[1:])
    return seen[:, rank].reshape(-1, *whole.shape[1:])


@pytest.mark.parametrize("outer", [1, 2])
def test_a_gather_keeps_shards(outer: int) -> None:
    """What a rank gathers of parts is its part of what is gathered of all."""
    own = [torch.randn(8, 5, dtype=torch.float64) for _ in range(OTHERS)]
    node = _call(_c10d.all_gather_into_tensor.default, own[0], OTHERS, "tensor")
    node.meta["val"] = torch.cat(own)
    given = Shard(0, outer)
    rows = rows_of(node, RANKS, [frozenset({given})], [frozenset()])
    (made,) = {row.outputs[0] for row in rows if row.inputs == (given,)}
    assert isinstance(made, Shard)
    for rank in range(RANKS):
        gathered = torch.cat([_part(x, given, rank) for x in own])
        assert torch.equal(gathered, _part(torch.cat(own), made, rank))
    back = rows_of(node, RANKS, [frozenset()], [frozenset({made})])
    assert (given,) in {row.inputs for row in back}


@pytest.mark.parametrize("outer", [1, 2])
def test_a_scatter_keeps_shards(outer: int) -> None:
    """Of its part of a sum a rank is given its part of what is scattered of all."""
    terms = [torch.randn(OTHERS * 8, 5, dtype=torch.float64) for _ in range(OTHERS)]
    node = _call(_c10d.reduce_scatter_tensor.default, terms[0], "sum", OTHERS, "tensor")
    node.meta["val"] = terms[0][:8]
    wanted = Shard(0, outer)
    rows = rows_of(node, RANKS, [frozenset()], [frozenset({wanted})])
    (given,) = {row.inputs[0] for row in rows if row.outputs == (wanted,)}
    assert isinstance(given, Shard)
    whole = sum(terms, torch.zeros_like(terms[0])).chunk(OTHERS)
    for rank in range(RANKS):
        parts = sum((_part(t, given, rank) for t in terms), torch.zeros(1, dtype=torch.float64))
        for other in range(OTHERS):
            assert torch.equal(parts.chunk(OTHERS)[other], _part(whole[other], wanted, rank))


def test_a_shard_that_a_gather_does_not_cut_evenly_is_none() -> None:
    """Of two sections before the ranks three gathered pieces can not be made."""
    node = _call(_c10d.all_gather_into_tensor.default, torch.randn(8, 5), OTHERS, "tensor")
    node.meta["val"] = torch.randn(8 * OTHERS, 5)
    rows = rows_of(node, RANKS, [frozenset()], [frozenset({Shard(0, 2)})])
    assert not [row for row in rows if isinstance(row.inputs[0], Shard)]


def test_products_with_experts_are_products() -> None:
    """As many as there are experts, each with an equal share of the rows: in 8 bits too."""
    x, w = torch.empty(96, 16), torch.empty(4, 16, 32)
    experts = torch.zeros(96, dtype=torch.int64)
    node = _call(GROUPED_MATMUL, x, w, experts, 0, 4, False)
    node.meta["val"], node.meta["dims"] = torch.empty(96, 32), (96, 32)
    work = node_work(node, Sizes({}))
    assert (work.kind, work.rows, work.columns, work.inner, work.count) == (
        "product", 24, 32, 16, 4,
    )  # fmt: skip
    assert work.flops == 2 * 96 * 16 * 32
    node = _call(GRADIENT, x, torch.empty(96, 32), experts, 0, 4, 4)
    node.meta["val"], node.meta["dims"] = torch.empty(4, 16, 32), (4, 16, 32)
    work = node_work(node, Sizes({}))
    assert (work.kind, work.rows, work.columns, work.inner, work.count) == (
        "product", 16, 32, 24, 4,
    )  # fmt: skip
