"""Cost in seconds of converting a tensor from one placement to another on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.shard import Placement, Shard


@dataclass(frozen=True)
class Rates:
    """Hardware rates that decide between placements: FLOP/s, bytes/s of memory, least seconds of an
    op, bytes/s and seconds of a hop on the links of the axis."""

    flops: float
    memory: float
    launch: float
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Counted:
    """Which of a graph's costs count in a step. number: it divides the element counts of tensors
    with a batch dim, and no others. share: of those elements to count, for a graph of more or fewer
    examples than will run. late: factor for the sum of a gradient, which happens once a step, where
    the graph is of one of several microbatches. examples: the number that is counted, each with the
    worth of memory: the choice does not depend on how a step is split into microbatches."""

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
    """Seconds to convert a tensor of `size` bytes; infinite where there is no conversion.

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
    if held or target == PARTIAL:  # a parameter is not gathered on this axis
        return inf
    if source == PARTIAL:
        if not floating:
            return inf
        if target == REPLICATED:
            return 2 * ((n - 1) * latency + passing) + r.launch
        copies = 0.0 if target == Shard(0) else 2 * size / r.memory
        return (n - 1) * latency + passing + copies + r.launch
    assert isinstance(source, Shard)
    if (
        not isinstance(target, Shard) or source.dim == target.dim  # replicated at least in between
        or source.padding or target.padding
    ):  # fmt: skip
        copies = 0.0 if source == Shard(0) else 2 * size / r.memory
        return (n - 1) * latency + passing + copies + r.launch
    return (n - 1) * latency + passing / n + 2 * size / n / r.memory + 2 * r.launch


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
    """To or from the ranks of the chosen experts: as if each expert were chosen equally often and
    rows could be sharded evenly (else a full tensor is exchanged, which costs more)."""
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
