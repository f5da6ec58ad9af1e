"""What it takes to have a tensor in another placement on one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from graphaccel.sharding.rules.propagate import PARTIAL, REPLICATED
from graphaccel.sharding.rules.shard import Placement, Shard


@dataclass(frozen=True)
class Rates:
    """What decides between placements: FLOP/s, bytes/s of memory, seconds an op takes at least,
    bytes/s and seconds of a hop on the links of the axis."""

    flops: float
    memory: float
    launch: float
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Counted:
    """What of a graph's costs counts in a step. number: it divides the elements of what is in
    examples, and of nothing else. share: of those elements to count, for a graph of more or fewer
    examples than will run. late: of what it takes to sum a gradient, which happens once a step,
    where the graph is of one of several microbatches. examples: so many are counted, each with what
    memory is worth: the choice does not depend on how a step is cut into microbatches."""

    number: int = 1
    share: float = 1.0
    late: float = 1.0
    examples: float = 1.0


ALL = Counted()


def conversion_seconds(
    size: float,
    floating: bool,
    source: Placement,
    target: Placement,
    held: bool,
    ranks: int,
    rates: Rates,
    latency: float,
) -> float:
    """Seconds to convert a tensor of `size` bytes; infinite where there is no way.

    held: it is a parameter, or a view of one.
    """
    n, r = ranks, rates
    passing = size * (n - 1) / n / r.bandwidth
    if any(isinstance(p, Shard) and p.by for p in (source, target)):
        return _by_experts(size, floating, source, target, held, n, r, latency)
    if source == REPLICATED:
        if target == PARTIAL:
            return 2 * size / r.memory + r.launch if floating else inf
        return 0.0 if isinstance(target, Shard) and target == Shard(0) else r.launch / 4
    if held or target == PARTIAL:  # a parameter is not gathered on this axis: it rests whole
        return inf
    if source == PARTIAL:
        if not floating:
            return inf
        if target == REPLICATED:
            return 2 * ((n - 1) * latency + passing) + r.launch
        copies = 0.0 if target == Shard(0) else 2 * size / r.memory
        return (n - 1) * latency + passing + copies + r.launch
    whole = target == REPLICATED or source.dim == target.dim  # on the way, at least
    if whole or source.padding or target.padding:
        copies = 0.0 if source == Shard(0) else 2 * size / r.memory
        return (n - 1) * latency + passing + copies + r.launch
    return (n - 1) * latency + passing / n + 2 * size / n / r.memory + 2 * r.launch


def passes_in_order(shard: Shard, shape: Sequence[int], ranks: int) -> bool:
    """Whether rows that lie on the ranks of their experts can be sent from and to ranks that have
    equally many of them, one after the other."""
    return shard.dim == 0 and shape[0] % ranks == 0


def _by_experts(
    size: float,
    floating: bool,
    source: Placement,
    target: Placement,
    held: bool,
    ranks: int,
    rates: Rates,
    latency: float,
) -> float:
    """To or from the ranks of the experts that rows chose: as if each expert were chosen as often,
    and rows could be split evenly (else a whole tensor is passed on, which costs more)."""
    share = size / ranks
    copied = 2 * share / rates.memory + rates.launch
    passing = share * (ranks - 1) / ranks / rates.bandwidth
    sent = (ranks - 1) * latency + passing + copied + rates.launch
    if isinstance(source, Shard) and source.by:
        if not floating or (isinstance(target, Shard) and target.by):
            return inf
        if source.dim or target == PARTIAL:
            spread = size / rates.memory + copied
            if target == PARTIAL:
                return spread
            rest = conversion_seconds(size, floating, PARTIAL, target, held, ranks, rates, latency)
            return spread + rest
        if target == Shard(0):
            return sent
        rest = conversion_seconds(size, floating, Shard(0), target, held, ranks, rates, latency)
        return sent + rest
    if source == REPLICATED:
        return copied
    if isinstance(target, Shard) and target.dim:
        rest = conversion_seconds(size, floating, source, REPLICATED, held, ranks, rates, latency)
        return rest + copied
    if source == Shard(0):
        return inf if held else sent
    rest = conversion_seconds(size, floating, source, Shard(0), held, ranks, rates, latency)
    return rest + sent
