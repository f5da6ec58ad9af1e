"""Head parallelism (DeepSpeed Ulysses): attention sharded by heads on the context axis.

  q k v  [b, h, s/n, d]  ->  all-to-all  ->  [b, h/n, s, d]  ->  attention  ->  all-to-all

Jacobs et al., DeepSpeed Ulysses, 2023, §3.1. Traffic shrinks with the number of ranks, and a causal
mask stays the kernel's `is_causal` flag, which halves the work; with queries sharded along the
sequence the kernel reads a mask, and keys and values are gathered. Key heads that several queries
share are sent before they are repeated.

Only attention and the calls that repeat its keys may be sharded so: elsewhere the axis shards
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from graphaccel.ir.values import op_of, operands
from graphaccel.sharding.rules.call_values import Value, source_of, tensor_of
from graphaccel.sharding.rules.shard import Row, Shard, Shards, shard_of

aten = torch.ops.aten
_sends = torch.ops._c10d_functional
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Positions of keys and values.
_KEYS: Mapping[Any, tuple[int, int]] = {_FORWARD: (1, 2), _BACKWARD: (2, 3)}
_REPEATS = frozenset({aten.expand.default, aten.clone.default, aten.view.default,
                      aten.reshape.default, aten._unsafe_view.default,
                      aten.unsqueeze.default})  # fmt: skip
_SUMS = frozenset({aten.sum.dim_IntList, aten.view.default, aten.reshape.default,
                   aten.squeeze.dim})  # fmt: skip
_REASONS = {
    "heads": "each device has the whole sequence of some of the heads",
    "sequence": "each device has some of the queries, and gathers keys and values",
    "whole": "each device does all of it, which takes less than to share it out",
}
_HEADS = 1  # the dim of heads in [b, h, s, d]


class HeadsDoNotDivide(ValueError):
    """No attention here can be sharded by heads."""


@dataclass(frozen=True)
class ByHeads:
    """calls: those that may be sharded by heads. values: what they read and return. seeds: those of
    attention itself."""

    calls: frozenset[fx.Node] = frozenset()
    values: frozenset[Value] = frozenset()
    seeds: tuple[Value, ...] = ()

    def elsewhere(self, node: fx.Node, value: Value, shards: Shards) -> Shards:
        """The shards of a value that a call may use: head shards only inside `calls`."""
        if value not in self.values or node in self.calls:
            return shards
        return frozenset(s for s in shards if not _of_heads(value, s))


def by_heads(
    calls: Sequence[fx.Node],
    reads: Mapping[fx.Node, Sequence[Value]],
    gives: Mapping[fx.Node, Sequence[Value]],
    ranks: int,
    inner: int,
) -> ByHeads:
    """Where attention can be sharded by heads over `ranks`, with heads left for the `inner` ranks
    of the tensor axis; nothing if the heads of some attention do not divide."""
    attention = [n for n in calls if n.target in _KEYS]
    users: dict[Value, list[fx.Node]] = {}
    for node in calls:
        for value in reads[node]:
            users.setdefault(value, []).append(node)
    results: set[fx.Node] = set()
    for node in attention:
        repeats = [list(_repeats(reads[node][at], reads)) for at in _KEYS[node.target]]
        own = [node, *chain(*repeats)]
        if node.target is _BACKWARD and any(repeats):
            own += chain(*(_summed(value, users, gives) for value in gives[node][1:]))
        tensors = [tensor_of(v) for n in own for v in _without_masks(n, reads, gives)]
        if any(t.shape[_HEADS] % (ranks * inner) for t in tensors if t.dim() == 4):
            return ByHeads()
        results.update(own)
    values = {v for n in results for v in _without_masks(n, reads, gives)}
    seeds = dict.fromkeys(v for n in attention for v in _without_masks(n, reads, gives))
    return ByHeads(frozenset(results), frozenset(values), tuple(seeds))


def context_notes(
    nodes: Iterable[fx.Node], whole: Iterable[fx.Node], *, context: int, tensor: int
) -> tuple[str, ...]:
    """What a report says of attention on the context axis. nodes: of what a device runs, identical
    ones once; whole: of the step before sharding; context, tensor: ranks of these axes."""
    if context == 1:
        return ()
    before = [_sizes(n) for n in whole if n.target is _FORWARD]
    lengths, most = {tuple(own[1:]) for own in before}, max((own[0] for own in before), default=0)
    results: set[str] = set()
    for node in nodes:
        if node.target is _sends.all_to_all_single.default and "context" in node.args:
            results.add("heads")
        elif node.target is _FORWARD:
            heads, *own = _sizes(node)
            few = "heads" if heads * tensor < most else "whole"
            results.add(few if tuple(own) in lengths else "sequence")
    if "heads" in results:
        results.discard("whole")  # a consequence of sharding by heads
    said = [text for way, text in _REASONS.items() if way in results]
    return ("attention on the context axis: " + "; or ".join(said),) if said else ()


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Number of heads, queries and keys of a call."""
    queries, keys = (tensor_of(source_of(value)).shape for value in operands(node)[:2])
    return int(queries[1]), int(queries[2]), int(keys[2])


def attention_rows(node: fx.Node, rows: tuple[Row, ...], context_by: str) -> tuple[Row, ...]:
    """The strategies that the pin asks for; all of them for other calls, and if none matches."""
    dim = {"heads": _HEADS, "sequence": 2}.get(context_by)
    if dim is None or node.target not in _KEYS:
        return rows
    asked = tuple(r for r in rows if isinstance(r.inputs[0], Shard) and r.inputs[0].dim == dim)
    return asked or rows


def split(shape: Sequence[int], ranks: int, inner: int) -> Shards:
    """Head shards of one of attention's tensors: within each part of a rank of the tensor axis."""
    result = shard_of(_HEADS, inner, shape, ranks)
    return frozenset({result} if result.fits(shape, ranks) else ())


def _without_masks(
    node: fx.Node,
    reads: Mapping[fx.Node, Sequence[Value]],
    gives: Mapping[fx.Node, Sequence[Value]],
) -> list[Value]:
    count = {_FORWARD: 3, _BACKWARD: 6}.get(op_of(node), len(reads[node]))
    return [*reads[node][:count], *gives[node]]


def _of_heads(value: Value, shard: Shard) -> bool:
    return _HEADS <= shard.dim < max(2, tensor_of(value).dim() - 2)


def _repeats(value: Value, reads: Mapping[fx.Node, Sequence[Value]]) -> Iterator[fx.Node]:
    """The calls that repeat a key head for its queries, back from what attention reads."""
    result, node = [], value[0]
    while node.target in _REPEATS and len(reads[node]) == 1:
        result.append(node)
        node = reads[node][0][0]
    last = max((k for k, n in enumerate(result) if n.target is aten.expand.default), default=-1)
    for k, each in enumerate(result):
        if k <= last or (last >= 0 and each.target is aten.unsqueeze.default and k == last + 1):
            yield each


def _summed(
    value: Value, users: Mapping[Value, Sequence[fx.Node]], gives: Mapping[fx.Node, Sequence[Value]]
) -> Iterator[fx.Node]:
    """The calls that sum the gradients of one key head."""
    summed = False
    while len(users.get(value, ())) == 1:
        node = users[value][0]
        if node.target not in _SUMS or (summed and node.target is aten.sum.dim_IntList):
            return
        if summed and tensor_of((node, 0)).dim() < 4:
            return
        yield node
        if summed:
            return
        summed = node.target is aten.sum.dim_IntList
        value = gives[node][0]
