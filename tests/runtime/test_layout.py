"""Shards out of a whole and a whole out of shards, for every way to split it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.ir.program import Sharded
from graphaccel.planner.plan.axis_order import AXES, coordinates
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.layout import ShardLayout

SIZES = {"pipeline": 1, "data": 2, "expert": 1, "context": 1, "tensor": 3}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Size, tuple[Sharded, ...]]:
    """A shape, and splits over tensor, data or both, perhaps on the same dim."""
    shape = [draw(st.sampled_from([12, 24, 36])) for _ in range(draw(st.integers(1, 2)))]
    axes = draw(st.sampled_from([("data",), ("tensor",), ("tensor", "data")]))
    splits = []
    for axis in axes:
        outer = draw(st.sampled_from([1, 1, 2])) if axis == "tensor" else 1
        splits.append(Sharded(axis, draw(st.integers(0, len(shape) - 1)), outer))
    return torch.Size(shape), tuple(splits)


def _layout(rank: int, shape: torch.Size, splits: tuple[Sharded, ...]) -> ShardLayout:
    return ShardLayout(shape, splits, Mesh(rank, SIZES))


@given(layouts())
def test_shards_make_the_whole(case: tuple[torch.Size, tuple[Sharded, ...]]) -> None:
    shape, splits = case
    whole = torch.arange(shape.numel()).view(shape)
    first = _layout(0, shape, splits)
    ranks = [r for r in range(6) if _stands_for(r, first.axes)]
    shards = [_layout(r, shape, splits).own(whole) for r in ranks]
    assert {s.shape for s in shards} == {first.local_shape}
    assert sorted(n for s in shards for n in s.reshape(-1).tolist()) == list(range(shape.numel()))
    assert torch.equal(first.assemble([s.contiguous() for s in shards]), whole)


def _stands_for(rank: int, axes: str) -> bool:
    """One rank for each place on `axes`, in their order."""
    at = coordinates(SIZES, rank)
    return all(at[axis] == 0 for axis in AXES if axis not in axes.split("+"))


@given(layouts(), st.integers(0, 5))
def test_boxes_say_where_a_shard_lies(
    case: tuple[torch.Size, tuple[Sharded, ...]], rank: int
) -> None:
    layout = _layout(rank, *case)
    whole = torch.arange(layout.shape.numel()).view(layout.shape)
    own = layout.own(whole)
    made = torch.full_like(own, -1)
    for offsets, places, sizes in layout.pieces():
        there = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        here = tuple(slice(p, p + n) for p, n in zip(places, sizes, strict=True))
        made[here] = whole[there]
    assert torch.equal(made, own)
    assert len(layout.pieces()) == 1 or not layout.simple or len(layout.splits) > 1


@given(st.integers(5, 40), st.sampled_from(["tensor", "data"]), st.integers(0, 1))
def test_uneven_dims(size: int, axis: str, dim: int) -> None:
    shape = torch.Size((size, 4) if dim == 0 else (4, size))
    whole = torch.arange(1, shape.numel() + 1).view(shape)
    layouts = [_layout(r, shape, (Sharded(axis, dim),)) for r in range(6)]
    ranks = [r for r in range(6) if _stands_for(r, axis)]
    shards = [layouts[r].own(whole).clone() for r in ranks]
    assert {s.shape for s in shards} == {layouts[0].local_shape}
    assert layouts[0].padded == (size % SIZES[axis] > 0)
    padding = layouts[0].local_shape[dim] * SIZES[axis] - size
    assert sum(int((s == 0).sum()) for s in shards) == 4 * padding
    assert torch.equal(layouts[0].assemble(shards), whole)
    for rank, shard in zip(ranks, shards, strict=True):
        assert layouts[rank].real(shard).ne(0).all()
        filled = torch.ones_like(shard)
        layouts[rank].clear(filled)
        assert torch.equal(filled == 0, shard == 0)
        boxes = [sizes for _, _, sizes in layouts[rank].pieces()]
        assert sum(torch.Size(s).numel() for s in boxes) == int((shard != 0).sum())
