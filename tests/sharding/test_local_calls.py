"""Every way to split a call over a mesh axis, run as each of two ranks runs it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from graphaccel.ir.values import tensors_of
from graphaccel.sharding.apply.shard_axis import local_sizes
from graphaccel.sharding.rules.batch_placement import PARTIAL
from graphaccel.sharding.rules.notation import output_shapes, shape_of, tensor_arguments
from graphaccel.sharding.rules.ops.factories import UNIFORM
from graphaccel.sharding.rules.prove import call_node
from graphaccel.sharding.rules.shard import Row, Shard
from graphaccel.sharding.rules.strategies import rows_of
from tests.support.ops.calls import Draw
from tests.support.ops.cases import CASES

aten = torch.ops.aten


class Seeded(Draw):
    """Draws by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def one(self, *choices: Any) -> Any:
        return self._random.choice(choices)


def part(value: Tensor, place: Any, rank: int) -> Tensor:
    """What a rank of two has of a tensor; of a partial sum the first one has all."""
    if place == PARTIAL:
        return value if rank == 0 else torch.zeros_like(value)
    if not isinstance(place, Shard):
        return value
    dim, shape = place.dim, value.shape
    seen = value.reshape(*shape[:dim], place.outer, 2, -1, *shape[dim + 1 :])
    own = seen.select(dim + 1, rank)
    return own.reshape(*shape[:dim], shape[dim] // 2, *shape[dim + 1 :]).contiguous()


def sharded_rows(node: fx.Node) -> Iterator[Row]:
    """The rows that split a dim of one of a call's tensors evenly, without a rewrite."""
    inputs = [shape_of(t) for t in tensor_arguments(node)]
    shards = [frozenset(Shard(d) for d in range(len(s))) for s in (*inputs, *output_shapes(node))]
    for row in rows_of(node, 2, shards[: len(inputs)], shards[len(inputs) :]):
        places = (*row.inputs, *row.outputs)
        if not row.lowering and any(isinstance(p, Shard) for p in places):
            yield row


def run(node: fx.Node, row: Row, rank: int) -> list[Tensor]:
    """The results of the call that one rank makes."""
    places = iter(row.inputs)

    def local(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        return part(argument.meta["val"], next(places), rank)

    args = fx.node.map_aggregate(local_sizes(node, row, tuple(node.args), 2), local)
    kwargs = fx.node.map_aggregate(dict(node.kwargs), local)
    return tensors_of(node.target(*args, **kwargs))


@pytest.mark.parametrize("target", CASES, ids=str)
def test_local_calls(target: Any) -> None:
    for seed in range(4):
        torch.manual_seed(0)
        args, kwargs = CASES[target](Seeded(seed))
        node = call_node(target, args, kwargs)
        for row in sharded_rows(node):
            ranks = [run(node, row, rank) for rank in (0, 1)]
            for k, wanted in enumerate(tensors_of(node.meta["val"])):
                place, got = row.outputs[k], [results[k] for results in ranks]
                if place == PARTIAL:
                    torch.testing.assert_close(got[0] + got[1], wanted, equal_nan=True)
                else:
                    expected = [part(wanted, place, rank) for rank in (0, 1)]
                    torch.testing.assert_close(got, expected, equal_nan=True)


_GIVEN = torch.zeros(2, 3)
FACTORIES: dict[Any, tuple[Any, ...]] = {
    aten.empty.memory_format: ([4, 6],),
    aten.zeros.default: ([4, 6],),
    aten.ones.default: ([4, 6],),
    aten.full.default: ([4, 6], 2.0),
    aten._efficientzerotensor.default: ([4, 6],),
    aten.new_empty.default: (_GIVEN, [4, 6]),
    aten.new_zeros.default: (_GIVEN, [4, 6]),
    aten.new_ones.default: (_GIVEN, [4, 6]),
    aten.new_full.default: (_GIVEN, [4, 6], 2.0),
    aten.new_empty_strided.default: (_GIVEN, [4, 6], [1, 4]),
}


def _has_sizes(target: Any) -> bool:
    return any(argument.name == "size" for argument in target._schema.arguments)


def test_every_factory_of_given_sizes_is_here() -> None:
    drawn = torch.Tag.nondeterministic_seeded  # those are not split
    assert set(FACTORIES) == {t for t in UNIFORM if _has_sizes(t) and drawn not in t.tags}


@pytest.mark.parametrize("target", FACTORIES, ids=str)
def test_factories_have_the_sizes_of_one_rank(target: Any) -> None:
    node = call_node(target, FACTORIES[target], {})
    rows = list(sharded_rows(node))
    assert {row.outputs[0] for row in rows} == {Shard(0), Shard(1)}
    for row in rows:
        (made,) = run(node, row, 0)
        whole = node.meta["val"]
        assert made.shape == part(whole, row.outputs[0], 0).shape
        assert (made.stride(0) < made.stride(1)) == (whole.stride(0) < whole.stride(1))
