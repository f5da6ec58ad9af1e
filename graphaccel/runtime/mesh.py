"""Process groups of a data x pipeline mesh: who talks to whom.

Rank r has data coordinate r % data and pipeline coordinate r // data: neighbours on the data axis
are neighbouring ranks. Stage k lies on pipeline coordinate k % pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.planner.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """This rank's place and the groups it needs. A group of one is None: nothing to say.

    world_group: all ranks, with the timeout of `optimize` (the default group has the script's).
    data_group: ranks with the same stages. pipeline_group: ranks that hold one replica together.
    shared_groups: sorted pipeline coordinates → the group of those ranks within this replica.
    channels: (source rank, destination rank, direction) → group (NCCL knows no tags; gloo needs
    none).
    """

    rank: int
    data: int
    pipeline: int
    data_index: int
    pipeline_index: int
    world_group: Any = field(repr=False, default=None)
    data_group: Any = field(repr=False, default=None)
    pipeline_group: Any = field(repr=False, default=None)
    shared_groups: dict[tuple[int, ...], Any] = field(repr=False, default_factory=dict)
    channels: dict[tuple[int, int, str], Any] = field(repr=False, default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline

    @property
    def other(self) -> str:
        """The other rank in words, where there is only one."""
        if self.world != 2:
            return ""
        stage = f" (stage {1 - self.pipeline_index})" if self.pipeline == 2 else ""
        return f"rank {1 - self.rank}{stage}"

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage of this rank's replica."""
        return (stage % self.pipeline) * self.data + self.data_index


def build_mesh(
    plan: Plan, shared: Iterable[tuple[int, ...]], device: torch.device, timeout: timedelta
) -> Mesh:
    """Make the groups; every rank calls this with the same arguments.

    shared: sets of stages that hold the same parameter.
    """
    if plan.devices == 1:
        return Mesh(0, 1, 1, 0, 0, device=device)
    rank = dist.get_rank()
    data, pipeline = plan.data, plan.pipeline
    here = (rank % data, rank // data)
    groups: dict[str, Any] = {"world": _group(list(range(data * pipeline)), timeout)}
    for p in range(pipeline):
        group = _group([p * data + d for d in range(data)], timeout)
        if p == here[1]:
            groups["data"] = group
    for d in range(data):
        group = _group([p * data + d for p in range(pipeline)], timeout)
        if d == here[0]:
            groups["pipeline"] = group
    coordinates = sorted({tuple(sorted({s % pipeline for s in stages})) for stages in shared})
    shared_groups = {}
    for places in coordinates:
        for d in range(data):
            group = _group([p * data + d for p in places], timeout)
            if d == here[0] and here[1] in places:
                shared_groups[places] = group
    channels = _channels(data, pipeline, timeout) if dist.get_backend() == "nccl" else {}
    return Mesh(
        rank,
        data,
        pipeline,
        *here,
        groups["world"],
        groups["data"],
        groups["pipeline"],
        shared_groups,
        channels,
        device,
    )


def _group(ranks: list[int], timeout: timedelta) -> Any:
    return dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None


def _channels(data: int, pipeline: int, timeout: timedelta) -> dict[tuple[int, int, str], Any]:
    """One communicator per ordered pair and direction: NCCL serialises what shares one."""
    made = {}
    for d in range(data):
        for source in range(pipeline):
            for destination in range(pipeline):
                if source == destination:
                    continue
                pair = (source * data + d, destination * data + d)
                for direction in ("forward", "backward"):
                    made[(*pair, direction)] = dist.new_group(sorted(pair), timeout=timeout)
    return made
