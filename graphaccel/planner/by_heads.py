"""Attention divided by its heads on the context axis, with whole sequences.

  q k v  [b, h, s/n, d]  ->  all-to-all  ->  [b, h/n, s, d]  ->  attention  ->  all-to-all

Jacobs et al., DeepSpeed Ulysses, 2023, §3.1. What is sent shrinks with the ranks, and a causal mask
stays one word to the kernel, which does half of the work; with queries split along the sequence it
sees a mask, and keys and values are gathered. Heads of keys that several queries share are sent
before they are repeated.

Only attention and what repeats its keys may lie so: elsewhere the axis splits sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx

from graphaccel.planner.call_values import Value, tensor_of
from graphaccel.planner.plan import Plan
from graphaccel.rules.shard import Placement, Shard, Shards, shard_of

aten = torch.ops.aten
_sends = torch.ops._c10d_functional
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_KEYS = {_FORWARD: (1, 2), _BACKWARD: (2, 3)}  # where it reads keys and values
_REPEATS = frozenset({aten.expand.default, aten.clone.default, aten.view.default,
                      aten.reshape.default, aten._unsafe_view.default,
                      aten.unsqueeze.default})  # fmt: skip
_SUMS = frozenset({aten.sum.dim_IntList, aten.view.default, aten.reshape.default,
                   aten.squeeze.dim})  # fmt: skip
_HEADS = 1  # their dim in [b, h, s, d]


class HeadsDoNotDivide(ValueError):
    """No attention here can have some of the heads on each rank."""


@dataclass(frozen=True)
class ByHeads:
    """calls: those that may have some of the heads each. values: what they read and give. seeds: of
    attention's own. attention: the calls among them."""

    calls: frozenset[fx.Node] = frozenset()
    values: frozenset[Value] = frozenset()
    seeds: tuple[Value, ...] = ()
    attention: frozenset[fx.Node] = frozenset()

    def elsewhere(self, node: fx.Node, value: Value, shards: Shards) -> Shards:
        """Of a value's shards those that a call may know of."""
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
    """Where attention may be divided by heads over `ranks`, and what is left of them by `inner`
    more, which the tensor axis has; nothing where some of its heads do not divide."""
    attention = [n for n in calls if n.target in _KEYS]
    users: dict[Value, list[fx.Node]] = {}
    for node in calls:
        for value in reads[node]:
            users.setdefault(value, []).append(node)
    found: set[fx.Node] = set()
    for node in attention:
        repeats = [list(_repeats(reads[node][at], reads)) for at in _KEYS[node.target]]
        own = [node, *chain(*repeats)]
        if node.target is _BACKWARD and any(repeats):
            own += chain(*(_summed(value, users, gives) for value in gives[node][1:]))
        tensors = [tensor_of(v) for n in own for v in _without_masks(n, reads, gives)]
        if any(t.shape[_HEADS] % (ranks * inner) for t in tensors if t.dim() == 4):
            return ByHeads()
        found.update(own)
    values = {v for n in found for v in _without_masks(n, reads, gives)}
    seeds = dict.fromkeys(v for n in attention for v in _without_masks(n, reads, gives))
    return ByHeads(frozenset(found), frozenset(values), tuple(seeds), frozenset(attention))


def context_notes(nodes: Iterable[fx.Node], plan: Plan) -> tuple[str, ...]:
    """What a report says of attention on the context axis; nodes: of what a device runs, alike ones
    once."""
    if plan.context == 1:
        return ()
    sent = {
        "heads": _sends.all_to_all_single.default,
        "sequence": _sends.all_gather_into_tensor.default,
    }
    says = {
        "heads": "each device has the whole sequence of some heads, which are sent by all-to-all",
        "sequence": "each device has some of the queries, and gathers keys and values",
    }
    found = {n.target for n in nodes if "attention" in str(n.target) or _on_context(n)}
    by = [way for way, target in sent.items() if target in found]
    if not by or not any("attention" in str(t) for t in found):
        return ()
    return ("attention on the context axis: " + "; or ".join(says[way] for way in by),)


def _on_context(node: fx.Node) -> bool:
    return node.op == "call_function" and "context" in node.args


def split(shape: Sequence[int], ranks: int, inner: int) -> Shards:
    """Of one of attention's tensors, by heads: of each part that a rank of the tensor axis has."""
    found = shard_of(_HEADS, inner, shape, ranks)
    return frozenset({found} if found.fits(shape, ranks) else ())


def along_queries(placements: Sequence[Placement | None]) -> bool:
    """Whether a row of attention has some of the queries on each rank."""
    return any(isinstance(p, Shard) and p.dim == 2 for p in placements)


def _without_masks(
    node: fx.Node,
    reads: Mapping[fx.Node, Sequence[Value]],
    gives: Mapping[fx.Node, Sequence[Value]],
) -> list[Value]:
    count = {_FORWARD: 3, _BACKWARD: 6}.get(node.target, len(reads[node]))
    return [*reads[node][:count], *gives[node]]


def _of_heads(value: Value, shard: Shard) -> bool:
    return _HEADS <= shard.dim < max(2, tensor_of(value).dim() - 2)


def _repeats(value: Value, reads: Mapping[fx.Node, Sequence[Value]]) -> Iterator[fx.Node]:
    """The calls that repeat a head of keys for its queries, back from what attention reads."""
    found, node = [], value[0]
    while node.target in _REPEATS and len(reads[node]) == 1:
        found.append(node)
        node = reads[node][0][0]
    last = max((k for k, n in enumerate(found) if n.target is aten.expand.default), default=-1)
    for k, each in enumerate(found):
        if k <= last or (last >= 0 and each.target is aten.unsqueeze.default and k == last + 1):
            yield each


def _summed(
    value: Value, users: Mapping[Value, Sequence[fx.Node]], gives: Mapping[fx.Node, Sequence[Value]]
) -> Iterator[fx.Node]:
    """The calls that add up the gradients of one head of keys."""
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
