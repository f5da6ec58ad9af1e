"""Messages between the stages of a pipeline: their bytes and their seconds."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import all_gather_seconds, link_between, send_seconds
from graphaccel.planner.estimate.estimated_memory import in_parts
from graphaccel.planner.plan.axis_order import number_of
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.candidate_cuts import stage_positions
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile


def device_number(plan: Plan, pipeline_rank: int, data_rank: int = 0) -> int:
    """The device number of pipeline rank `pipeline_rank` of replica `data_rank`, the first of the
    devices that hold the stage together."""
    between, within = divmod(data_rank, plan.shards)
    place = {"pipeline": pipeline_rank, "data": data_rank, "replicate": between, "shard": within}
    return number_of(plan.sizes, place)


def scatters(plan: Plan, cluster: Cluster) -> bool:
    """Whether sending in parts is faster: of S bytes, (t - 1) / t go over the links between the
    tensor ranks of a stage instead of those between stages."""
    if plan.tensor == 1 or plan.pipeline == 1:
        return False
    numbers = [device_number(plan, rank) for rank in range(plan.pipeline)]
    between = min(link_between(cluster, *pair).bandwidth for pair in pairwise(numbers))
    return link_between(cluster, 0, (plan.tensor - 1) * plan.stride("tensor")).bandwidth > between


def message_bytes(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], int]:
    """Bytes of each message: (source stage, destination stage, "forward" or "backward")."""
    return {key: sent for key, (sent, _) in _messages(profile, sized, plan).items()}


def gathered_bytes(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], int]:
    """Bytes that the tensor ranks of a destination gather of each message that is sent in parts."""
    result = _messages(profile, sized, plan).items()
    return {key: gathered for key, (_, gathered) in result if gathered}


def _messages(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], tuple[int, int]]:
    """(bytes sent, bytes gathered of it) by message."""
    request = plan.cuts, plan.scatter_sends
    return sized.analyses.cached(request, _find_messages, profile, sized, plan)


def _find_messages(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], tuple[int, int]]:
    ends = np.array([end - 1 for _, end in stage_positions(profile, plan.cuts)])
    crossing = profile.crossing
    source = np.searchsorted(ends, crossing.at)
    which, place = crossing.uses
    reader = np.searchsorted(ends, place)
    far = reader != source[which]
    whole, floating = sized.bytes[crossing.storage], profile.storages.floating[crossing.storage]
    parts = in_parts(profile, sized, plan)
    sent, gathered = np.where(parts, whole // plan.tensor, whole), np.where(parts, whole, 0)
    results: dict[tuple[int, int, str], np.ndarray] = defaultdict(lambda: np.zeros(2, dtype=int))
    for value, stage in sorted(set(zip(which[far].tolist(), reader[far].tolist(), strict=True))):
        message = np.array((sent[value], gathered[value]))
        results[int(source[value]), stage, "forward"] += message
        if floating[value]:
            results[stage, int(source[value]), "backward"] += message
    return {key: (int(both[0]), int(both[1])) for key, both in results.items()}


def edge_seconds(
    profile: Profile, sized: SizedProfile, plan: Plan, cluster: Cluster
) -> dict[tuple[int, int, str], float]:
    """Seconds of each message to another rank."""
    mesh = plan.pipeline, plan.stride("pipeline"), plan.tensor, plan.stride("tensor")
    request = plan.cuts, *mesh, plan.scatter_sends, cluster.links, cluster.count
    return sized.analyses.cached(request, _edge_seconds, profile, sized, plan, cluster)


def _edge_seconds(
    profile: Profile, sized: SizedProfile, plan: Plan, cluster: Cluster
) -> dict[tuple[int, int, str], float]:
    gathered = gathered_bytes(profile, sized, plan)
    seconds = {}
    for edge, size in message_bytes(profile, sized, plan).items():
        source, destination = (stage % plan.pipeline for stage in edge[:2])
        if source != destination:
            numbers = device_number(plan, source), device_number(plan, destination)
            seconds[edge] = send_seconds(cluster, size, *numbers) + all_gather_seconds(
                cluster, gathered.get(edge, 0), plan.tensor, plan.stride("tensor")
            )
    return seconds
