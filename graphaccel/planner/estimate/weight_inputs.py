"""What waits for gradients of weights that a schedule computes apart from the backward.

Between the two (`passes.stages.split_weights`) a microbatch holds what the matmuls of its weights
read: their inputs, recomputed or saved, and the gradients of their results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphaccel.planner.estimate.stage_costs import StageCost
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile


def weight_inputs(profile: Profile, sized: SizedProfile) -> np.ndarray:
    """Bytes of one microbatch that wait for the gradients of weights, by the position that reads
    them first."""
    return sized.analyses.cached((), _weight_inputs, profile, sized)


def _weight_inputs(profile: Profile, sized: SizedProfile) -> np.ndarray:
    storages, late = profile.storages, profile.node_weight
    storage, reader, place, _ = storages.uses
    here = late[reader] & storages.value[storage] & ~late[storages.row[storage]]
    here &= ~storages.common[storage] & ~storages.released[storage]
    kept, first = np.unique(storage[here], return_index=True)
    return np.bincount(place[here][first], sized.bytes[kept], minlength=len(profile))


def with_weight_inputs(
    profile: Profile,
    sized: SizedProfile,
    plan: Plan,
    costs: Sequence[StageCost],
    each: np.ndarray,
    own: np.ndarray,
) -> np.ndarray:
    """The most bytes that each stage holds of microbatches, where gradients of weights are apart.

    each: bytes that a stage saves of a microbatch up to its backward. own: the most that one holds
    while it computes. Stage s of S runs the weights' part of a microbatch s backwards after its
    backward (`schedule.table.zero_bubble`): in the backward of number k it holds min(S - s, M - k)
    of which the backward is to come, that one included, and min(s, k) of which the weights are.
    Both are linear between the `k` that are tried.
    """
    waiting = weight_inputs(profile, sized)
    late = np.array([int(waiting[work.first : work.end].sum()) for work in costs])
    stage, many = np.arange(len(costs)), plan.microbatches
    ahead = len(costs) - stage
    most = np.zeros(len(costs), dtype=np.int64)
    for k in (0 * stage, np.minimum(stage, many - 1), np.maximum(many - ahead, 0), many - 1):
        before = (np.minimum(ahead, many - k) - 1) * each
        behind = np.minimum(stage, k) * late
        most = np.maximum(most, before + behind + np.maximum(own, late))
    return most
