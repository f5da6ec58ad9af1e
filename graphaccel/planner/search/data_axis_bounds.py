"""Lower bounds on the exposed traffic over the data axis, for many plans at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import INTERFERENCE, all_gather_seconds
from graphaccel.planner.estimate.data_axis import bucket_seconds
from graphaccel.planner.estimate.zero_shards import perhaps_kept
from graphaccel.planner.plan.pins import RESHARDS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class LeastMoved:
    """Lower bounds on the seconds of a device to reduce all gradients and to gather all parameters
    over the data axis. scatter: of reducing, the part that each microbatch repeats; beside: the
    share of a phase's seconds, all stages together, that can hide them, and slows: by how much a
    phase takes longer for each hidden second; low: of gathering in the dtype in which parameters
    are read. Numbers, or columns of them."""

    reduce: Any
    scatter: Any
    gather: Any
    beside: Any
    low: Any
    slows: Any

    def exposed(self, of: Any, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """Lower bound on the exposed seconds of a step, for any cuts. of:
        `planner.search.bounds.Columns`. forward, backward: seconds of a microbatch, all stages."""

        def least(moved: Any, phase: np.ndarray) -> np.ndarray:  # lower bound of `exposed_seconds`
            return np.maximum(self.slows * moved, moved - self.beside * phase)

        always, never = (of.reshard == RESHARDS.index(reshard) for reshard in ("always", "never"))
        shards = (of.zero >= 2) & of.shards
        gather = np.where(never, self.gather, self.low)
        gathering = np.where(always | never, of.microbatches, 1)
        summing = np.where(shards, of.microbatches, 1)

        def backwards(more: Any) -> np.ndarray:
            before = (summing - 1) * least(self.scatter + more, backward)
            return before + least(self.reduce + more, backward)

        reduces = backwards(0.0)
        behind_backward = backwards(gather) + (gathering - summing) * least(gather, backward)
        third = gathering * least(gather, forward) + np.where(always, behind_backward, reduces)
        return np.where(of.zero == 3, third, reduces + np.where(of.zero == 0, 0.0, self.gather))


def least_moved(profile: Profile, plan: Plan, cluster: Cluster, extra: int = 1) -> LeastMoved:
    """Lower bounds on the traffic over the data axis. extra: the factor by which parameters will be
    sharded further than in the profile. They depend on the plan's axes, and on whether ZeRO is 2 or
    more.

    Gradients may be partial over any of the other axes too: an all-reduce over a group that
    includes these and is inside one node may take less than over data alone.
    """
    if plan.data == 1:
        return LeastMoved(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def seconds(move: Callable[[float], float], size: float) -> float:
        """Latencies are omitted where a stage may have nothing to communicate."""
        return move(size) if plan.pipeline == 1 else max(0.0, move(size) - move(1))

    def gather(size: float) -> float:
        return all_gather_seconds(cluster, size, plan.shards, plan.stride("data"))

    others = [axis for axis in ("context", "tensor", "expert") if getattr(plan, axis) > 1]
    groups = [axes for n in range(len(others) + 1) for axes in combinations(others, n)]
    groups = groups if plan.zero < 2 else [()]  # shards are summed over the other axes separately
    width = 2 if plan.precision.reduce in ("bfloat16", "float16") else 4
    trained = profile.trained_bytes / extra / plan.pipeline
    # What is certainly sharded: dims that both the ranks of ZeRO and the further sharding divide.
    whole = perhaps_kept(profile, plan.shards * extra)
    shared = trained - whole / extra / plan.pipeline
    low = shared / 2 if plan.precision.stream != "float32" else shared

    def summed(axes: tuple[str, ...]) -> float:
        return seconds(
            lambda size: sum(bucket_seconds(cluster, size, axes, plan)), trained * width / 4
        )

    return LeastMoved(
        min(map(summed, groups)),
        seconds(lambda size: bucket_seconds(cluster, size, (), plan)[0], trained * width / 4),
        seconds(gather, shared),
        0.0 if cluster.device.type == "cpu" else 1 / plan.pipeline,
        seconds(gather, low),
        INTERFERENCE,
    )
