"""Runs a sharded graph as all ranks of a mesh, node by node, in one process.

Collectives see what all ranks have at that node: they need no process group here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.kernels.ops.expert_rows import EXCHANGE
from graphaccel.sharding.rules.ops.collectives import is_message
from graphaccel.sharding.rules.shard import Shard

_ops = torch.ops._c10d_functional


def run_ranks(
    graph: fx.Graph,
    inputs: Sequence[Sequence[Any]],
    at: Sequence[Mapping[str, int]],
    seed: int = 0,
) -> list[list[Any]]:
    """The results of every rank, given every rank's placeholders' values.

    at: coordinate of every rank on each axis.
    """
    ranks = len(inputs)
    known: list[dict[fx.Node, Any]] = [{} for _ in range(ranks)]
    given = [iter(values) for values in inputs]
    for step, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            for rank in range(ranks):
                known[rank][node] = next(given[rank])
        elif node.op == "output":
            return [
                [values[n] if isinstance(n, fx.Node) else n for n in node.args[0]]
                for values in known
            ]
        else:
            arguments = [_arguments(node, at[rank], values) for rank, values in enumerate(known)]
            waited = node.target is _ops.wait_tensor.default
            unfinished = [n for n in node.all_input_nodes if is_message(n.target)]
            assert waited or all(n.target is _ops.wait_tensor.default for n in unfinished), node
            if is_message(node.target):
                results = _collectives(node, [args for args, _ in arguments], at)
            else:
                results = []
                for args, kwargs in arguments:
                    torch.manual_seed(seed + step)
                    results.append(node.target(*args, **kwargs))
            for values, result in zip(known, results, strict=True):
                values[node] = result
                _check(node, result)
    raise AssertionError("a graph without an output")


def _arguments(
    node: fx.Node, at: Mapping[str, int], values: dict[fx.Node, Any]
) -> tuple[tuple, dict]:
    args = list(node.args)
    for position, (axis, step) in node.meta.get("bind", {}).items():
        args[position] = at[axis] * step
    return fx.node.map_arg((tuple(args), dict(node.kwargs)), lambda n: values[n])


def _check(node: fx.Node, result: Any) -> None:
    """The fake value that the memory model counts is what comes out."""
    said = node.meta["val"]
    pairs = [(said, result)] if isinstance(result, Tensor) else zip(said, result, strict=True)
    for wanted, got in pairs:
        if isinstance(got, Tensor):
            differ = [a != b for a, b in zip(wanted.shape, got.shape, strict=True)]
            assert sum(differ) <= bool(node.meta.get("chosen")), (node, wanted.shape, got.shape)
            assert wanted.dtype == got.dtype or got.dtype == torch.float64, node


def _collectives(node: fx.Node, args: list[tuple], at: Sequence[Mapping[str, int]]) -> list[Tensor]:
    """One result per rank; ranks that differ on the collective's axis alone talk to each other."""
    axis = node.args[-1]
    groups: dict[Any, list[int]] = {}
    for rank, place in enumerate(at):
        others = tuple((a, c) for a, c in sorted(place.items()) if a != axis)
        key = rank if node.target is _ops.wait_tensor.default else others
        groups.setdefault(key, []).append(rank)
    found: dict[int, Tensor] = {}
    for members in groups.values():
        members.sort(key=lambda r: at[r].get(axis, 0))
        results = _collective(node, [args[r] for r in members])
        found |= dict(zip(members, results, strict=True))
    return [found[rank] for rank in range(len(at))]


def _collective(node: fx.Node, args: list[tuple]) -> list[Tensor]:
    tensors = [a[0] for a in args]
    if node.target is _ops.wait_tensor.default:
        return tensors
    if node.target is _ops.all_reduce.default:
        stacked = torch.stack(tensors)
        total = stacked.sum(0) if args[0][1] == "sum" else stacked.amax(0)
        return [total.clone() for _ in tensors]
    assert all(t.is_contiguous() for t in tensors), node
    if node.target is _ops.all_gather_into_tensor.default:
        return [torch.cat(tensors) for _ in tensors]
    if node.target is _ops.reduce_scatter_tensor.default:
        return [t.clone() for t in torch.stack(tensors).sum(0).chunk(len(tensors))]
    if node.target is EXCHANGE:
        sends = [counts[int(back)].tolist() for _, counts, back, _ in args]
        cut = [t.split(sizes) for t, sizes in zip(tensors, sends, strict=True)]
        return [torch.cat([rows[rank] for rows in cut]) for rank in range(len(tensors))]
    if node.target is _ops.all_to_all_single.default:
        parts = [t.chunk(len(tensors)) for t in tensors]
        return [torch.cat([p[rank] for p in parts]) for rank in range(len(tensors))]
    raise AssertionError(node.target)


def part_of(value: Tensor, shard: Shard, ranks: int, rank: int) -> Tensor:
    """What `rank` has of a whole tensor."""
    if shard.padding:
        behind = value.dim() - 1 - shard.dim
        value = torch.nn.functional.pad(value, [0, 0] * behind + [0, shard.padding])
        return value.chunk(ranks, shard.dim)[rank].contiguous()
    d, shape = shard.dim, list(value.shape)
    rest = shape[d] // (shard.outer * ranks)
    seen = value.reshape(*shape[:d], shard.outer, ranks, rest, *shape[d + 1 :])
    return seen.select(d + 1, rank).reshape(shard.local(shape, ranks)).contiguous()


def whole_of(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole tensor, from what every rank has; what is padding must be zero."""
    d, shape = shard.dim, list(parts[0].shape)
    if shard.padding:
        whole = torch.cat(list(parts), d)
        size = whole.shape[d] - shard.padding
        assert not whole.narrow(d, size, shard.padding).any(), "the padding is not zero"
        return whole.narrow(d, 0, size)
    seen = [*shape[:d], shard.outer, 1, shape[d] // shard.outer, *shape[d + 1 :]]
    joined = torch.cat([p.reshape(seen) for p in parts], d + 1)
    return joined.reshape(*shape[:d], shape[d] * len(parts), *shape[d + 1 :])
