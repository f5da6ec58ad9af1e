"""Which blocks to compute again in the backward pass, to save memory.

A recomputed block keeps only what enters it, what others want of it, and the results of random
ops; the rest is made again, one block at a time. Its price is its forward once more (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174). Choosing blocks is a knapsack:
the fewest seconds that save the bytes needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphaccel.planner.profile import Profile, SizedProfile

_UNITS = 2000


@dataclass(frozen=True)
class BlockOption:
    """Recomputing one block: bytes saved for one microbatch in flight, and seconds of its
    forward.
    """

    block: int
    name: str
    saved_bytes: int
    seconds: float


def block_options(profile: Profile, sized: SizedProfile) -> tuple[BlockOption, ...]:
    """What recomputing each block alone would save and cost; blocks that save nothing are left
    out.
    """
    return sized.once("block options", lambda: _block_options(profile, sized))


def _block_options(profile: Profile, sized: SizedProfile) -> tuple[BlockOption, ...]:
    lost, block, more, enters = profile.alone
    count = len(profile.block_names)
    saving = np.zeros(count, dtype=np.int64)
    np.add.at(saving, block, sized.bytes[lost])
    np.subtract.at(saving, enters, sized.bytes[more])
    seconds = sized.block_seconds()
    return tuple(
        BlockOption(
            number, profile.block_names[number], int(saving[number]), float(seconds[number])
        )
        for number in np.flatnonzero(saving > 0).tolist()
    )


def cheapest(savings: Sequence[float], prices: Sequence[float], needed: float) -> list[int] | None:
    """Indices of the items with the least total price whose savings reach `needed`; None if none
    do.

    Exact but for rounding: savings are counted in 1/2000 of the need, rounded down.
    """
    if needed <= 0:
        return []
    if sum(savings) < needed:
        return None
    units = [min(_UNITS, int(s / needed * _UNITS)) for s in savings]
    if sum(units) < _UNITS:
        return list(range(len(savings)))
    if len(set(units)) == len(set(prices)) == 1 and prices[0] > 0:  # what the table would say
        return list(range(math.ceil(_UNITS / units[0])))
    best = np.full(_UNITS + 1, np.inf)
    best[0] = 0.0
    taken = np.zeros((len(units), _UNITS + 1), dtype=bool)
    with_item = np.empty_like(best)
    for item, (unit, price) in enumerate(zip(units, prices, strict=True)):
        with_item[:unit] = best[0] + price  # more than is needed
        np.add(best[: _UNITS + 1 - unit], price, out=with_item[unit:])
        np.less(with_item, best, out=taken[item])
        np.minimum(best, with_item, out=best)
    chosen, left = [], _UNITS
    for item in range(len(units) - 1, -1, -1):
        if taken[item, left]:
            chosen.append(item)
            left = max(left - units[item], 0)
    return chosen[::-1]


def every_second(names: Sequence[str]) -> tuple[str, ...]:
    """Every second block: what `recompute="some"` means where memory does not ask for more."""
    return tuple(names[1::2]) if len(names) > 1 else tuple(names)
