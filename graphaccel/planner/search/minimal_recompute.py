"""Chooses the least recomputation with which every rank fits in memory.

The bytes that a choice frees are estimated: bytes of a microbatch times the microbatches in flight
while the rank is fullest. Recomputed values also take memory, and the stages of a rank peak at
different times. So a rank is first asked to free the bytes it is short of, and more as long as it
is still short, scaled by how much too little the earlier requests freed. Where that frees far more
than necessary, the request is lowered again, between the last one that did not fit and the one that
did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.estimated_memory import predict_memory
from graphaccel.planner.estimate.optimizer_memory import OptimizerMemory
from graphaccel.planner.estimate.stage_costs import held_together, sized_for
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.candidate_cuts import stage_positions
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.recompute import BlockOption, Item, Knapsack

Choice = dict[str, tuple[str, ...]]
_ROUNDS = 8  # rounds of predicting memory
_SLOW = 1.5  # bytes asked for per byte freed, above which more is asked for
_MOST = 16.0  # times what is missing
_SPARE = 1 / 32  # of the memory: more free than that is far more


def needed(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    optimizer_bytes: int,
    step_memory: OptimizerMemory,
    options: Sequence[Sequence[BlockOption]],
    least: int,
) -> Choice:
    """The recomputation, block → values that are saved of it: the fewest seconds with which every
    rank fits, or the most that all of a rank's blocks can free if none does. options: the options
    of each block. least: how many of them, the first ones, are taken where memory does not require
    any: 0 or 1."""
    if not any(options):
        return {}
    ranks = _ranks(profile, sized_for(profile, plan, cluster), plan, options, least)
    names, fits = profile.block_names, False

    def together(chosen: Sequence[Choice]) -> Choice:
        every = {name: saved for own in chosen for name, saved in own.items()}
        return {name: every[name] for name in names if name in every}

    def missing(chosen: Sequence[Choice]) -> list[int]:
        given = plan.with_recomputed(together(chosen)), cluster, optimizer_bytes, step_memory
        return [m.tensors - cluster.tensor_budget for m in predict_memory(profile, *given)]

    spare = _SPARE * cluster.tensor_budget
    tried = [rank.chosen for rank in ranks]
    most = [rank.all for rank in ranks]
    for round_number in range(_ROUNDS):
        over = missing(tried)
        fits = all(more <= 0 for more in over)
        if not fits and not round_number and any(more > 0 for more in missing(most)):
            return together(most)
        changed = [rank.asks(more, spare) for rank, more in zip(ranks, over, strict=True)]
        if not any(changed):
            break
        tried = [rank.chosen for rank in ranks]
    results = [rank.best for rank in ranks]
    if (results != tried or not fits) and any(more > 0 for more in missing(results)):
        results = most  # for blocks that span two ranks
    return together(results)


class Rank:
    """The recompute options chosen for one rank's blocks, and the bytes they are asked to free."""

    def __init__(
        self, blocks: Sequence[Sequence[BlockOption]], waiting: Sequence[int], least: int
    ) -> None:
        """blocks: the options of each; waiting: microbatches that each block holds values for at a
        time."""
        self._blocks, self._least = blocks, least
        self._items = Knapsack(
            [_beyond(own, count, least) for own, count in zip(blocks, waiting, strict=True)]
        )
        self._asked = self._low = self._missed = 0.0  # bytes: the most that was not enough
        self._high = math.inf  # the least that was enough
        self._fitting: Choice | None = None
        self.chosen = self._choice(0.0)

    @property
    def best(self) -> Choice:
        """The choice that fits, or else the one that frees most."""
        return self.all if self._fitting is None else self._fitting

    @property
    def all(self) -> Choice:
        """The choice that frees most."""
        return self._choice(math.inf)

    def asks(self, missing: float, spare: float) -> bool:
        """Update the choice by the result of the last one: missing is how many bytes it is short of
        (negative: bytes left). Returns whether the choice changed."""
        before = self.chosen
        if missing > 0:
            if self._asked >= self._high:  # another rank's choice has changed what this rank holds
                self._high, self._fitting = math.inf, None
            self._ask_more(missing)
        elif self._asked <= self._high:
            self._high, self._fitting = self._asked, before
            if -missing > spare and self._asked > self._low:
                self._asked = (self._low + min(self._asked, self._items.most)) / 2
                self.chosen = self._choice(self._asked)
        return self.chosen != before

    def _ask_more(self, missing: float) -> None:
        gave, more = self._missed - missing, self._asked - self._low
        rate = min(more / gave, _MOST) if gave > 0 else _MOST
        further = missing * (rate if more > 0 and rate > _SLOW else 1.0)
        before, self._low, self._missed = self.chosen, self._asked, missing
        while self.chosen == before and self._asked < math.inf:
            request = self._asked + further
            if request >= self._high:
                self._asked = (self._asked + self._high) / 2
                self.chosen = self._choice(self._asked)
                return  # there may be no choice in between
            self._asked = request if request <= self._items.most else math.inf
            self.chosen = self._choice(self._asked)
            further *= 2

    def _choice(self, asked: float) -> Choice:
        """The values saved of each recomputed block, if so many bytes are to be freed."""
        picked = self._items.cheapest(asked) if asked <= self._items.most else None
        last = [len(own) - 1 - self._least for own in self._blocks]
        request = zip(self._blocks, last if picked is None else picked, strict=True)
        least = self._least
        return {own[0].name: own[k + least].saved for own, k in request if k + least >= 0}


def _beyond(own: Sequence[BlockOption], count: int, least: int) -> list[Item]:
    """Bytes and seconds of a block's options beyond those of the option that is taken anyway."""
    saved, seconds = (own[0].saved_bytes, own[0].seconds) if least else (0, 0.0)
    return [((o.saved_bytes - saved) * count, o.seconds - seconds) for o in own[least:]]


def _ranks(
    profile: Profile,
    sized: SizedProfile,
    plan: Plan,
    options: Sequence[Sequence[BlockOption]],
    least: int,
) -> list[Rank]:
    ends = np.array([end for _, end in stage_positions(profile, plan.cuts)])
    stages = np.searchsorted(ends, profile.block_first, side="right").tolist()
    waiting = held_together(plan, _saved_by_stage(profile, sized, ends)).tolist()
    blocks: list[list[Sequence[BlockOption]]] = [[] for _ in range(plan.pipeline)]
    counts: list[list[int]] = [[] for _ in range(plan.pipeline)]
    for stage, own in zip(stages, options, strict=True):
        if own:
            blocks[stage % plan.pipeline].append(own)
            counts[stage % plan.pipeline].append(waiting[stage])
    return [Rank(own, count, least) for own, count in zip(blocks, counts, strict=True)]


def _saved_by_stage(profile: Profile, sized: SizedProfile, ends: np.ndarray) -> np.ndarray:
    """Bytes that each stage saves of a microbatch without recomputation."""
    kept, at, *_ = profile.saved(profile.no_recomputation)
    return np.bincount(np.searchsorted(ends - 1, at), sized.bytes[kept], minlength=len(ends))
