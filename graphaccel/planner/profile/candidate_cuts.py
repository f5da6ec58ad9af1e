"""Candidate pipeline cuts of a step: the positions after which few bytes are sent on.

A cut is a position of the forward graph. Its cost is what crosses it: every value computed at or
before it and used after it is sent on, and its gradient comes back. Values that depend on batch and
constants only (masks, positions) and casts of parameters do not cross: each stage computes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class Candidates:
    """Positions after which a stage may end, ascending, and bytes of activations that cross
    each."""

    positions: tuple[int, ...]
    bytes: tuple[int, ...]


def candidate_cuts(profile: Profile, sized: SizedProfile) -> Candidates:
    """Local minima of the crossing bytes, with a parameter used between any two and at both ends.

    Of several cuts between which no parameter is used the one with fewest bytes is kept, the latest
    of equals: an activation function stays with the layer before it.
    """
    return sized.analyses.cached((), _candidate_cuts, profile, sized)


def _candidate_cuts(profile: Profile, sized: SizedProfile) -> Candidates:
    used, between, offered = profile.analyses.cached((), _where, profile)
    crossing = np.where(between, _crossing_bytes(profile, sized), np.iinfo(np.int64).max)
    here = np.flatnonzero(offered & _local_minima(crossing))
    order = here[np.lexsort((-here, crossing[here], used[here]))]
    _, first = np.unique(used[order], return_index=True)
    chosen = order[first]
    return Candidates(tuple(chosen.tolist()), tuple(crossing[chosen].tolist()))


def _where(profile: Profile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number of parameters used up to each position; whether it is between two of them; whether
    also a value that may cross is computed there)."""
    used = np.zeros(len(profile) + 1, dtype=np.int64)
    casts = np.zeros(len(profile) + 1, dtype=bool)
    casts[profile.node_position[profile.node_released]] = True
    computes = np.flatnonzero(~casts)
    for parameter in profile.parameters:  # a cast of it comes before the compute that reads it
        if parameter.positions:
            first = np.searchsorted(computes, parameter.positions[0])
            used[computes[first]] += 1
    used = np.cumsum(used)[:-1]
    between = (used > 0) & (used < used[-1])
    between &= ~_chosen_cross(profile)
    offered = np.zeros(len(profile), dtype=bool)
    offered[profile.crossing.at] = True
    return used, between, offered & between


def _crossing_bytes(profile: Profile, sized: SizedProfile) -> np.ndarray:
    """Bytes of activations that cross a cut after each position."""
    change = np.zeros(len(profile) + 1, dtype=np.int64)
    crossing = profile.crossing
    np.add.at(change, crossing.at, sized.bytes[crossing.storage])
    np.subtract.at(change, crossing.last, sized.bytes[crossing.storage])
    return np.cumsum(change)[:-1]


def _chosen_cross(profile: Profile) -> np.ndarray:
    """Whether rows that were dispatched to the ranks of their experts cross a cut after each
    position: messages between stages must have a size that is known beforehand."""
    crossing, lines = profile.crossing, profile.lines
    chosen = lines.by_row([bool(n.meta.get("chosen")) for n in lines.nodes])
    row = chosen[profile.storages.row[crossing.storage]]
    change = np.zeros(len(profile) + 1, dtype=np.int64)
    np.add.at(change, crossing.at[row], 1)
    np.subtract.at(change, crossing.last[row], 1)
    return np.cumsum(change)[:-1] > 0


def _local_minima(values: np.ndarray) -> np.ndarray:
    """Which positions are in runs of equal values that are higher on both sides (ends count as
    higher)."""
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    level = values[starts]
    falls, rises = level[:-1] > level[1:], level[:-1] < level[1:]
    low = np.append(True, falls) & np.append(rises, True)
    return np.repeat(low, np.diff(starts, append=len(values)))


def stage_positions(profile: Profile, cuts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) position of each stage.

    Raises: ValueError for cuts that are no forward nodes or not in ascending order.
    """
    unknown = [name for name in cuts if name not in profile.position]
    if unknown:
        raise ValueError(f"no node of the forward graph is called {unknown[0]}")
    ends = [-1, *(profile.position[name] for name in cuts), len(profile) - 1]
    if any(a >= b for a, b in pairwise(ends)):
        raise ValueError("cuts must be in the order of the forward graph and leave no stage empty")
    return tuple((a + 1, b + 1) for a, b in pairwise(ends))
