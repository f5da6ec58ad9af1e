"""Recompute options of each block, and the knapsack that chooses among them to free memory.

A block that is fully recomputed saves only its inputs, its values that other blocks read, and the
results of random ops; the rest is recomputed, one block at a time (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", arXiv:1604.06174). Selective recomputation saves some more values
(`planner.search.selective_recompute`). The choice for all blocks is a multiple-choice knapsack with
at most one option per block: the fewest seconds that free the bytes needed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, combinations_with_replacement, product

import numpy as np

from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.selective_recompute import leanest_of, ways_of

_UNITS = 2000
_ALL = 5000  # choices up to which each is enumerated
_TABLE = 64  # options of all blocks together, above which identical blocks are counted

_WAYS = 64  # of the few blocks that are not identical

Item = tuple[float, float]


@dataclass(frozen=True)
class BlockOption:
    """A way of recomputing one block: bytes freed for one microbatch in flight, seconds of
    recomputation, and the labels of the values that stay saved; none if it is fully recomputed."""

    block: int
    name: str
    saved_bytes: int
    seconds: float
    saved: tuple[str, ...] = ()


def block_options(profile: Profile, sized: SizedProfile) -> tuple[tuple[BlockOption, ...], ...]:
    """The bytes freed and seconds of recomputing each block alone, for each of its options, the
    fewest seconds first; options that free nothing are left out."""
    return sized.analyses.cached((), _block_options, profile, sized)


def _block_options(profile: Profile, sized: SizedProfile) -> tuple[tuple[BlockOption, ...], ...]:
    block_optionses: list[tuple[BlockOption, ...]] = [()] * len(profile.block_names)
    for kind, ways in zip(profile.block_kinds, ways_of(profile, sized), strict=True):
        described = [(w.less, w.seconds, tuple(kind.labels[i] for i in w.saved)) for w in ways]
        for block in kind.blocks:
            name = profile.block_names[block]
            block_optionses[block] = tuple(BlockOption(block, name, *each) for each in described)
    return tuple(block_optionses)


def least_saved(profile: Profile, sized: SizedProfile) -> int:
    """Lower bound on the bytes of a microbatch that are saved for the backward, whatever is
    recomputed."""
    leanest = {
        block: way.saved
        for kind, way in zip(profile.block_kinds, leanest_of(profile, sized), strict=True)
        if way is not None
        for block in kind.blocks
    }
    several = (profile.no_recomputation, profile.full_recomputation, profile.saving(leanest))
    return min(int(sized.saved(recomputation)[0].sum()) for recomputation in several)


class Knapsack:
    """A knapsack over blocks, for repeated queries.

    blocks: of each its items, (saving, price). Where there are few blocks, or they are identical,
    every choice is enumerated. Of many identical blocks, only two kinds of items and one single
    item are combined: the optimum of the linear relaxation has two, so that at most the price of
    one item is lost. A few other blocks, as the first and the last often are, are tried in all
    their combinations.
    """

    def __init__(self, blocks: Sequence[Sequence[Item]]) -> None:
        self._blocks = blocks
        self.most = sum(max((s for s, _ in items), default=0.0) for items in blocks)
        kinds: dict[tuple[Item, ...], list[int]] = defaultdict(list)
        for number, items in enumerate(blocks):
            kinds[tuple(items)].append(number)
        described = tuple((items, len(own)) for items, own in kinds.items())
        few = math.prod(math.comb(n + len(items), n) for items, n in described) <= _ALL
        self._every = _every(described) if few else None
        self._kinds = list(kinds.values())
        self._many = _Many.of(blocks, self._kinds) if not few and self.most > 0 else None

    def cheapest(self, needed: float) -> list[int] | None:
        """For each block the item that is chosen, -1 for none: the least total price whose savings
        reach `needed`; None if no choice does. Exact where every choice is enumerated; in the
        dynamic-programming table savings are counted in 1/2000 of the need, rounded down."""
        blocks = self._blocks
        if needed <= 0:
            return [-1] * len(blocks)
        if self.most < needed:
            return None
        if self._every is not None:
            return self._counted(self._every.cheapest(needed))
        if self._many is not None:
            return self._many.cheapest(needed)
        units = [[min(_UNITS, int(s / needed * _UNITS)) for s, _ in items] for items in blocks]
        if sum(max(own, default=0) for own in units) < _UNITS:
            return [max(range(len(i)), key=lambda k, i=i: i[k][0], default=-1) for i in blocks]
        best = np.full(_UNITS + 1, np.inf)
        best[0] = 0.0
        taken = np.full((len(blocks), _UNITS + 1), -1, dtype=np.int8)
        with_item = np.empty_like(best)
        for block, items in enumerate(blocks):
            before = best.copy()
            for item, (unit, (_, price)) in enumerate(zip(units[block], items, strict=True)):
                with_item[:unit] = before[0] + price  # more than is needed
                np.add(before[: _UNITS + 1 - unit], price, out=with_item[unit:])
                np.copyto(taken[block], item, where=with_item < best)
                np.minimum(best, with_item, out=best)
        chosen, left = [-1] * len(blocks), _UNITS
        for block in range(len(blocks) - 1, -1, -1):
            item = chosen[block] = int(taken[block, left])
            if item >= 0:
                left = max(left - units[block][item], 0)
        return chosen

    def _counted(self, chosen: Sequence[Sequence[int]]) -> list[int]:
        """Items by block, from those of each kind of blocks: the first blocks of a kind get them,
        and the first of these the item that saves most."""
        result = [-1] * len(self._blocks)
        for own, items in zip(self._kinds, chosen, strict=True):
            saving = self._blocks[own[0]]
            order = sorted(items, key=lambda item, saving=saving: -saving[item][0])
            for number, item in zip(own, order, strict=False):
                result[number] = item
        return result


@dataclass(frozen=True)
class _Every:
    """All choices for blocks, where only the number of blocks of a kind with an item counts. ways:
    for each kind of blocks the combinations of items. savings: of the choices on the Pareto front
    (nothing cheaper saves more), ascending; places: their index among all combinations of the ways.
    """

    ways: Sequence[Sequence[tuple[int, ...]]]
    savings: np.ndarray
    places: np.ndarray

    def cheapest(self, needed: float) -> list[tuple[int, ...]]:
        """The chosen items of each kind. Some choice reaches `needed`."""
        at = min(int(np.searchsorted(self.savings, needed)), len(self.savings) - 1)
        chosen = np.unravel_index(self.places[at], [len(own) for own in self.ways])
        return [own[int(way)] for own, way in zip(self.ways, chosen, strict=True)]


@lru_cache(maxsize=256)
def _every(kinds: tuple[tuple[tuple[Item, ...], int], ...]) -> _Every:
    """kinds: kinds of blocks, as their items and the number of blocks."""
    ways, savings, prices = [], np.zeros(1), np.zeros(1)
    for items, count in kinds:
        each = [way for n in range(count + 1)
                for way in combinations_with_replacement(range(len(items)), n)]  # fmt: skip
        ways.append(each)
        saving, price = (np.array([sum(items[i][k] for i in way) for way in each]) for k in (0, 1))
        savings = np.add.outer(savings, saving).ravel()
        prices = np.add.outer(prices, price).ravel()
    order = np.lexsort((-savings, prices))
    ahead = np.maximum.accumulate(savings[order])
    best = np.append(True, ahead[1:] > ahead[:-1])
    return _Every(ways, savings[order][best], order[best])


@dataclass(frozen=True)
class _Many:
    """Blocks of which most have the same items. at: the numbers of those; few: the numbers of the
    others."""

    blocks: Sequence[Sequence[Item]]
    at: tuple[int, ...]
    few: tuple[int, ...]

    @staticmethod
    def of(blocks: Sequence[Sequence[Item]], kinds: Sequence[Sequence[int]]) -> _Many | None:
        """None where a table of all blocks is less work. kinds: numbers of identical blocks."""
        at = max(kinds, key=len)
        few = [n for own in kinds if own is not at for n in own]
        ways = math.prod(len(blocks[n]) + 1 for n in few)
        if len(at) * len(blocks[at[0]]) <= _TABLE or ways > _WAYS:
            return None
        return _Many(blocks, tuple(at), tuple(few))

    def cheapest(self, needed: float) -> list[int]:
        """As `Knapsack.cheapest`. Some choice reaches `needed`."""
        best: tuple[float, list[int]] | None = None
        for others in product(*(range(-1, len(self.blocks[n])) for n in self.few)):
            taken = [self.blocks[n][k] for n, k in zip(self.few, others, strict=True) if k >= 0]
            price = sum(p for _, p in taken)
            if best is not None and price >= best[0]:
                continue
            left = needed - sum(saving for saving, _ in taken)
            result = _identical_blocks(len(self.at), self.blocks[self.at[0]], left)
            if result is not None and (best is None or price + result[0] < best[0]):
                chosen = [-1] * len(self.blocks)
                for number, item in zip((*self.few, *self.at), (*others, *result[1]), strict=True):
                    chosen[number] = item
                best = price + result[0], chosen
        assert best is not None
        return best[1]


def _identical_blocks(
    count: int, items: Sequence[Item], needed: float
) -> tuple[float, list[int]] | None:
    """The cheapest choice for `count` blocks with the same items, with its price: items that save
    most come first."""
    saving, price = np.array(items, dtype=float).T
    pairs = [*combinations(range(len(items)), 2), *((i, i) for i in range(len(items)))]
    a, b = np.array(pairs).T[:, :, None, None]  # [pair, single, number of b]
    single = np.arange(-1, len(items))[:, None]
    less, more = (np.append(0.0, column)[:, None] for column in (saving, price))
    own = np.arange(count + 1) * (a != b)
    rest = np.ceil(np.maximum(needed - less - own * saving[b], 0.0) / saving[a])
    prices = rest * price[a] + own * price[b] + more
    prices = np.where(rest + own + (single >= 0) <= count, prices, np.inf)
    pair, one, many = (int(n) for n in np.unravel_index(prices.argmin(), prices.shape))
    if prices[pair, one, many] == np.inf:
        return None
    first, second = pairs[pair]
    result = [first] * int(rest[pair, one, many]) + [second] * int(own[pair, 0, many])
    chosen = sorted([*result, *[one - 1] * (one > 0)], key=lambda item: -items[item][0])
    return float(prices[pair, one, many]), chosen + [-1] * (count - len(chosen))


def every_second(names: Sequence[str]) -> tuple[str, ...]:
    """Every second block: what `recompute="some"` means where memory does not require more."""
    return tuple(names[1::2]) if len(names) > 1 else tuple(names)
