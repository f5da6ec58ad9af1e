"""What a device sends in a step, by mesh axis: bytes and seconds on the wire, hidden or exposed.

The collectives of the tensor, context and expert axes are calls of the graph; traffic over data
(`planner.estimate.data_axis`) and over the pipeline (`planner.estimate.stage_messages`) follows
from the plan. All figures are those of the pipeline rank that sends most over the axis.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from graphaccel.capture.symbols import BATCH
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import (
    all_gather_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from graphaccel.planner.estimate.data_axis import reduce_counts, shards_seconds
from graphaccel.planner.estimate.estimated_memory import gathered_sizes
from graphaccel.planner.estimate.stage_costs import (
    StageCost,
    held_parameters,
    sized_for,
    stage_costs,
)
from graphaccel.planner.estimate.stage_messages import device_number, gathered_bytes, message_bytes
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import KINDS, collective_costs_of, sent_bytes
from graphaccel.planner.profile.cost import Sizes
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class Traffic:
    """One kind of message over one axis (several: `data+tensor`), of a device and a step.

    calls: number of messages. bytes: of the full tensors that they move. seconds: on the wire.
    """

    axis: str
    kind: str
    calls: int
    bytes: int
    seconds: float


def traffic(profile: Profile, plan: Plan, cluster: Cluster) -> tuple[Traffic, ...]:
    """What a device sends in a step of `plan`, the innermost axis first."""
    sized = sized_for(profile, plan, cluster)
    costs = stage_costs(profile, sized, plan, cluster.device.launch_seconds)
    collective_costs = collective_costs_of(cluster, plan)
    step = profile.step
    sizes = Sizes({**step.sizes, **({BATCH: plan.microbatch_size} if BATCH in step.sizes else {})})
    results: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    ends = np.array([work.end for work in costs])
    for node, place in zip(profile.nodes, profile.node_position, strict=True):
        if node.target in KINDS:
            row = np.zeros((plan.pipeline, 3))
            rank = int(np.searchsorted(ends, place, side="right")) % plan.pipeline
            one = 1, sent_bytes(node, sizes), collective_costs.seconds(node, sizes)
            row[rank] = np.array(one) * plan.microbatches
            results[str(node.args[-1]), KINDS[node.target]].append(row)
    for stage, work in enumerate(costs):
        for axis, kind, *row in _over_data(profile, work, plan, cluster):
            rows = np.zeros((plan.pipeline, 3))
            rows[stage % plan.pipeline] = row
            results[axis, kind].append(rows)
    for rank, row in _messages(profile, sized, plan, cluster):
        rows = np.zeros((plan.pipeline, 3))
        rows[rank] = row
        results["pipeline", "send"].append(rows)
    for (_, stage, _), size in gathered_bytes(profile, sized, plan).items():
        rows, times = np.zeros((plan.pipeline, 3)), plan.microbatches
        one = all_gather_seconds(cluster, size, plan.tensor, plan.stride("tensor"))
        rows[stage % plan.pipeline] = times, size * times, one * times
        results["tensor", "all-gather"].append(rows)
    order = ("tensor", "context", "expert", "shard", "replicate", "data", "pipeline")
    summed = {key: np.sum(rows, axis=0) for key, rows in results.items()}
    built = []
    for (axis, kind), rows in summed.items():
        calls, size, seconds = rows[int(rows[:, 1].argmax())]
        built.append(Traffic(axis, kind, int(calls), int(size), float(seconds)))
    return tuple(sorted(built, key=lambda t: (order.index(t.axis.split("+")[0]), t.axis, t.kind)))


def _over_data(
    profile: Profile, work: StageCost, plan: Plan, cluster: Cluster
) -> list[tuple[str, str, int, float, float]]:
    """Gradients and parameters of one stage: (axes, kind, calls, bytes, seconds)."""
    collective_costs, result = collective_costs_of(cluster, plan), []
    width = 2 if plan.precision.reduce in ("bfloat16", "float16") else 4
    times = plan.microbatches if plan.zero >= 2 and plan.accumulation == "shards" else 1
    sizes = {axes: held * width / 4 for axes, held in work.summed.items() if held > 0}
    counts = reduce_counts(profile, work, plan, sizes)
    for axes, size in sizes.items():
        calls, inner = counts[axes], axes
        if plan.data > 1 and plan.zero >= 2:
            one = reduce_scatter_seconds(cluster, size / calls, plan.shards, plan.stride("data"))
            result.append((plan.shard_axis, "reduce-scatter", calls * times, size * times,
                          calls * times * one))  # fmt: skip
            size /= plan.shards
            inner = (*(("replicate",) if plan.num_replicas > 1 else ()), *axes)
            one = shards_seconds(cluster, size / calls, axes, plan)
        else:
            inner = (*(("data",) if plan.data > 1 else ()), *axes)
            one = collective_costs.all_reduce(size / calls, inner)
        if inner:
            result.append(("+".join(inner), "all-reduce", calls, size, calls * one))
    if plan.zero and plan.data > 1:
        sizes = [work.gradient] if plan.zero < 3 else _groups(profile, work, plan)
        times = 1
        if plan.zero == 3 and not plan.holds_gathered:
            times = plan.microbatches * (1 if plan.reshard_after_forward == "never" else 2)
        seconds = sum(
            all_gather_seconds(cluster, n, plan.shards, plan.stride("data")) for n in sizes
        )
        result.append((plan.shard_axis, "all-gather", len(sizes) * times, sum(sizes) * times,
                      seconds * times))  # fmt: skip
    return result


def _groups(profile: Profile, work: StageCost, plan: Plan) -> list[int]:
    """Bytes of each group of parameters that ZeRO 3 gathers at once, of one stage."""
    held = held_parameters(profile, [(work.first, work.end)])
    return gathered_sizes(profile, held, plan)


def _messages(
    profile: Profile, sized: SizedProfile, plan: Plan, cluster: Cluster
) -> list[tuple[int, tuple[int, int, float]]]:
    """(pipeline rank, (calls, bytes, seconds)) of the messages between stages."""
    results = []
    for (source, destination, _), size in message_bytes(profile, sized, plan).items():
        a, b = source % plan.pipeline, destination % plan.pipeline
        if a != b:
            one = send_seconds(cluster, size, device_number(plan, a), device_number(plan, b))
            times = plan.microbatches
            results.append((a, (times, size * times, one * times)))
    return results
