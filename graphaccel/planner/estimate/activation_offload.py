"""Activations offloaded to the host: their bytes by position, and the seconds of their copies.

Counted are storages that are saved for the backward and have `LARGE` bytes or more; the pass
(`passes.activations.offload_activations`) leaves some of these on the device, and a built program
has the exact list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.stage_costs import StageCost
from graphaccel.planner.plan.offload import LARGE
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile


def offloaded_bytes(profile: Profile, sized: SizedProfile, plan: Plan) -> np.ndarray:
    """Bytes of one microbatch that are offloaded, by the position whose backward reads them."""
    if "activations" not in plan.offload:
        return np.zeros(len(profile), dtype=np.int64)
    request = plan.recompute, plan.selective
    return sized.analyses.cached(request, _offloaded_bytes, profile, sized, plan)


def _offloaded_bytes(profile: Profile, sized: SizedProfile, plan: Plan) -> np.ndarray:
    saved, at, *_ = profile.saved(profile.recomputation(plan))
    large = sized.bytes[saved] >= LARGE
    size = sized.bytes[saved[large]]
    return np.bincount(at[large], size, minlength=len(profile)).astype(np.int64)


def beside(profile: Profile, offloaded: np.ndarray, here: slice) -> np.ndarray:
    """Bytes on the device of what is offloaded, while each position computes: the offloaded values
    of its block, which are copied to the host after their last use and back before their first."""
    block, own = profile.block_at[here], offloaded[here]
    inside = block >= 0
    sums = np.bincount(block[inside], own[inside], minlength=len(profile.block_names) + 1)
    return np.where(inside, sums[block], own).astype(np.int64)


def with_copies(
    profile: Profile, sized: SizedProfile, plan: Plan, costs: Sequence[StageCost], cluster: Cluster
) -> tuple[StageCost, ...]:
    """The costs of the stages with the copies of a microbatch: to the host beside the forward if
    the device is not its own host, and back before the backward goes on."""
    assert cluster.host is not None
    offloaded, result = offloaded_bytes(profile, sized, plan), []
    for work in costs:
        seconds = float(offloaded[work.first : work.end].sum()) / cluster.host.link
        down = seconds if cluster.host.shared else max(0.0, seconds - work.forward)
        result.append(replace(work, forward=work.forward + down, backward=work.backward + seconds))
    return tuple(result)
