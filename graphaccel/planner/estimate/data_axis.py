"""Exposed seconds of the traffic over the data axis.

It consists of gradients reduced beside the backward, parameters gathered under ZeRO, and gradients
of parameters that several stages use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import (
    all_gather_seconds,
    exposed_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from graphaccel.planner.estimate.estimated_memory import gathered_sizes
from graphaccel.planner.estimate.gradient_buckets import bucket_count, copy_seconds
from graphaccel.planner.estimate.stage_costs import StageCost, held_parameters
from graphaccel.planner.estimate.stage_messages import device_number
from graphaccel.planner.estimate.zero_shards import kept_bytes, kept_whole
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import collective_costs_of
from graphaccel.planner.profile.profile import Profile


def reduce_seconds(
    profile: Profile, costs: Sequence[StageCost], plan: Plan, cluster: Cluster
) -> list[float]:
    """Exposed seconds of each stage's gradients and parameters; identical stages are computed
    once."""
    shared = profile.analyses.cached(plan.cuts, _shared_bytes, profile, costs)
    known: dict[object, float] = {}
    results = []
    for stage, work in enumerate(costs):
        kind: object = work.gradient, work.partial, work.backward, work.weight
        kind = kind, kept_bytes(profile, plan, [(work.first, work.end)])
        if plan.zero == 3 and plan.data > 1:  # the parameters that are held matter
            kind = kind, work.forward, _groups(profile, work, plan)
        if kind not in known:
            known[kind] = _stage_seconds(profile, work, plan, cluster)
        results.append(known[kind] + _shared_seconds(shared[stage], plan, cluster, stage))
    return results


def _stage_seconds(profile: Profile, work: StageCost, plan: Plan, cluster: Cluster) -> float:
    """Exposed seconds of a stage's traffic over data: its gradients beside the last microbatch's
    backward, or beside each; parameters (`_gathered`) beside forward and backward, or after the
    optimizer."""
    before, last, copies = _summed(profile, work, plan, cluster)
    summing = plan.microbatches if plan.accumulation == "shards" and plan.zero >= 2 else 1
    beside = work.weight if plan.schedule == "zero_bubble" else work.backward

    def backwards(*gathered: tuple[float, float]) -> float:
        """Exposed seconds of the backwards that reduce gradients, beside which parameters are
        gathered."""
        result = _exposed(cluster, beside, last, *gathered)
        return result + (summing - 1) * _exposed(cluster, beside, before, *gathered) + copies

    if not plan.zero or plan.data == 1:
        return _exposed(cluster, beside, last)
    if plan.zero < 3:
        return backwards() + _gathered_after(profile, work, plan, cluster)
    gathered, more = _gathered(profile, work, plan, cluster)
    gathering = 1 if plan.holds_gathered else plan.microbatches
    ahead = gathering * (_exposed(cluster, work.forward, gathered) + more)
    if plan.reshard_after_forward != "always":
        return backwards() + ahead
    alone = (gathering - summing) * _exposed(cluster, beside, gathered)
    return backwards(gathered) + alone + gathering * more + ahead


def _exposed(cluster: Cluster, beside: float, *moves: tuple[float, float]) -> float:
    """Exposed seconds of collectives that share the links beside a phase. moves: (seconds, seconds
    of a piece) of each."""
    moved, piece = (sum(each) for each in zip(*moves, strict=True))
    return exposed_seconds(cluster.device, moved, piece, beside)


def _summed(
    profile: Profile, work: StageCost, plan: Plan, cluster: Cluster
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """(traffic of each microbatch that reduces a stage's gradients, traffic of the last one,
    seconds of the copies around it in a step); traffic: (seconds, seconds of its slowest
    collective)."""
    width = 2 if plan.precision.reduce in ("bfloat16", "float16") else 4
    sizes = {axes: size * width / 4 for axes, size in work.summed.items() if size > 0}
    counts = reduce_counts(profile, work, plan, sizes)
    one = {x: bucket_seconds(cluster, sizes[x] / counts[x], x, plan) for x in sizes}
    if plan.zero >= 2:  # replicated parameters are not scattered: their sum is gathered, too
        kept = kept_bytes(profile, plan, [(work.first, work.end)]).trained / max(1, work.gradient)
        one = {x: (scattered * (1 + kept), rest) for x, (scattered, rest) in one.items()}

    def moved(seconds: Mapping[tuple[str, ...], float]) -> tuple[float, float]:
        total = sum(counts[axes] * each for axes, each in seconds.items())
        return total, max(seconds.values(), default=0.0)

    copies = 0.0
    if plan.zero >= 2 and plan.data > 1:  # written or added into its group's flat tensor
        copies = plan.microbatches * copy_seconds(sum(sizes.values()), cluster.device)
    before = moved({axes: scattered for axes, (scattered, _) in one.items()})
    return before, moved({axes: sum(each) for axes, each in one.items()}), copies


def reduce_counts(
    profile: Profile, work: StageCost, plan: Plan, sizes: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], int]:
    """Number of collectives that reduce a stage's gradients in a backward, by the axes besides
    data: with ZeRO 3 one for each group of parameters, otherwise one for each bucket. sizes: bytes
    by axes."""
    total = sum(sizes.values())
    if plan.zero == 3 and plan.data > 1:
        groups = len(_groups(profile, work, plan))
        return {axes: max(1, math.ceil(groups * size / total)) for axes, size in sizes.items()}
    scattered = plan.zero == 2 and plan.data > 1
    return {axes: bucket_count(size, plan.bucket_bytes, total, scattered=scattered)
            for axes, size in sizes.items()}  # fmt: skip


def _gathered_after(profile: Profile, work: StageCost, plan: Plan, cluster: Cluster) -> float:
    """Seconds to gather what the optimizer changed, once, after it (ZeRO 1 and 2): a rank's shard
    is copied into a bucket, and those of the other ranks out of it."""
    shared = work.gradient - kept_bytes(profile, plan, [(work.first, work.end)]).trained
    if not shared:
        return 0.0
    calls = math.ceil(shared / plan.bucket_bytes)
    copies = copy_seconds(shared, cluster.device)
    return copies + _gathers(cluster, [shared / calls] * calls, plan)


def _gathered(
    profile: Profile, work: StageCost, plan: Plan, cluster: Cluster
) -> tuple[tuple[float, float], float]:
    """((seconds to gather all groups of a stage, seconds of the first), seconds of copies) of ZeRO
    3: each group is gathered ahead of use in every forward, and again in every backward where the
    plan resharded it; or all of them once, beside the first forward."""
    sizes = _groups(profile, work, plan)
    first = _gathers(cluster, sorted(sizes)[-1:], plan)
    return (_gathers(cluster, sizes, plan), first), copy_seconds(sum(sizes), cluster.device)


def _groups(profile: Profile, work: StageCost, plan: Plan) -> tuple[int, ...]:
    """Bytes of each group of parameters that ZeRO 3 gathers at once, of a stage."""
    span = (work.first, work.end)
    request = span, plan.gathers_low, kept_whole(profile, plan)
    return profile.analyses.cached(request, _group_sizes, profile, span, plan)


def _group_sizes(profile: Profile, span: tuple[int, int], plan: Plan) -> tuple[int, ...]:
    return tuple(gathered_sizes(profile, held_parameters(profile, [span]), plan))


def _gathers(cluster: Cluster, sizes: Sequence[float], plan: Plan) -> float:
    apart = plan.stride("data")
    each = {s: all_gather_seconds(cluster, s, plan.shards, apart) for s in set(sizes)}
    return sum(each[size] for size in sizes)


def bucket_seconds(
    cluster: Cluster, size: float, axes: tuple[str, ...], plan: Plan
) -> tuple[float, float]:
    """Seconds to reduce a bucket of `size` bytes of gradients over data and `axes`:
    (reduce-scatter, in each microbatch that reduces it; what the last microbatch does in addition).

    ZeRO 2 and 3 reduce-scatter it over the devices that shard; the shards are then all-reduced.
    """
    if size <= 0:
        return 0.0, 0.0
    if plan.zero < 2 or plan.data == 1:
        return 0.0, collective_costs_of(cluster, plan).all_reduce(size, ("data", *axes))
    seconds = reduce_scatter_seconds(cluster, size, plan.shards, plan.stride("data"))
    return seconds, shards_seconds(cluster, size / plan.shards, axes, plan)


def shards_seconds(cluster: Cluster, size: float, axes: tuple[str, ...], plan: Plan) -> float:
    """Seconds to all-reduce shards of `size` bytes of gradients over their replicas and `axes`: one
    all-reduce over both, which takes no longer than one after the other."""
    collective_costs = collective_costs_of(cluster, plan)
    return collective_costs.all_reduce(size, ("replicate",)) + collective_costs.all_reduce(
        size, axes
    )


def _shared_bytes(profile: Profile, costs: Sequence[StageCost]) -> list[int]:
    """Of each stage, bytes of trained parameters that other stages use too."""
    ends = np.array([work.end for work in costs])
    result = [0] * len(costs)
    for parameter in profile.parameters:
        if parameter.trainable and len(parameter.positions) > 1:
            stages = set(np.searchsorted(ends, parameter.positions, side="right").tolist())
            for stage in stages if len(stages) > 1 else ():
                result[stage] += parameter.bytes
    return result


def _shared_seconds(size: int, plan: Plan, cluster: Cluster, stage: int) -> float:
    """Seconds to sum the gradients of parameters that stages on other ranks use too: there and
    back."""
    if plan.pipeline == 1 or not size:
        return 0.0
    rank = stage % plan.pipeline
    other = device_number(plan, rank - 1 if rank else 1)
    return 2 * send_seconds(cluster, size, device_number(plan, rank), other)
