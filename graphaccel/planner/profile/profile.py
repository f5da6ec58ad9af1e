"""The profile of a step: a sequence of positions, with seconds and bytes at each.

`Profile` adds to the columns of a step (`planner.profile.step_columns`) what is recomputed, and
the numbers for one microbatch size (`planner.profile.microbatch_profile.SizedProfile`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import CollectiveCosts
from graphaccel.planner.profile.block_recompute import (
    BlockKind,
    Recomputation,
    chosen_positions,
    find_kinds,
    recomputation_of,
    saved_with,
)
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.step_columns import StepColumns

_CACHED = 2**25  # bytes of recompute choices that are cached: with many layers each is large


class Profile(StepColumns):
    """Positions, storages, parameters and blocks of a step; sized profiles are cached."""

    @cached_property
    def _sized(self) -> dict[Any, SizedProfile]:
        return {}

    @cached_property
    def _devices(self) -> dict[int, tuple[Device, Device]]:
        return {}

    def sized(
        self,
        microbatch: int,
        device: Device,
        collective_costs: CollectiveCosts | None = None,
        chunk: int = 0,
    ) -> SizedProfile:
        """Numbers for `microbatch` examples on `device`.

        collective_costs: costs of the collectives in the graph, where it has some. chunk: see
        `SizedProfile`."""
        if collective_costs is not None:  # no call of the graph is over data, the outer axis
            collective_costs = collective_costs.inside
        key = (microbatch, self._without_memory(device), collective_costs, chunk)
        if key not in self._sized:
            sized_profile = SizedProfile(self, microbatch, device, collective_costs, chunk)
            self._sized[key] = sized_profile
            if not chunk and sized_profile.chunks:  # the preferred size
                self._sized.setdefault((*key[:-1], sized_profile.chunks[0]), sized_profile)
        return self._sized[key]

    def _without_memory(self, device: Device) -> Device:
        """The device without its memory, which changes no number of a profile; one for each."""
        if id(device) not in self._devices:
            self._devices[id(device)] = device, replace(device, memory=0)
        return self._devices[id(device)][1]

    def recomputation(self, plan: Plan) -> Recomputation:
        """What `plan` recomputes."""
        return self.saving(chosen_positions(self, self.block_kinds, plan))

    def saving(self, saved: Mapping[int, tuple[int, ...]]) -> Recomputation:
        """What is recomputed where blocks (numbers) save these of their positions, by their order
        in the block, and nothing else."""
        return self._cached(frozenset(saved.items())) if saved else self.no_recomputation

    @cached_property
    def _cached(self) -> Callable[[frozenset[tuple[int, tuple[int, ...]]]], Recomputation]:
        each = self.no_recomputation
        size = sum(column.nbytes for column in (each.rows, each.inner, each.until, each.before))
        return lru_cache(max(8, _CACHED // max(size, 1)))(self._recomputation)

    def _recomputation(self, saved: frozenset[tuple[int, tuple[int, ...]]]) -> Recomputation:
        return recomputation_of(self, self.block_kinds, dict(saved))

    @cached_property
    def no_recomputation(self) -> Recomputation:
        """No recomputation."""
        return recomputation_of(self, (), {})

    @cached_property
    def full_recomputation(self) -> Recomputation:
        """Full recomputation of every block."""
        return self.saving(dict.fromkeys(range(len(self.block_names)), ()))

    def saved(self, recomputation: Recomputation) -> tuple[np.ndarray, ...]:
        """What is saved and recomputed for the backward
        (`planner.profile.block_recompute.saved_with`)."""
        return saved_with(self, recomputation)

    @cached_property
    def block_kinds(self) -> tuple[BlockKind, ...]:
        """The blocks by kind: blocks of one kind have the same forward."""
        return find_kinds(self)
