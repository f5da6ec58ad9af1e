"""Process groups of a device mesh with named axes.

The plan gives the order of the axes over the ranks (`planner.plan.axis_order`): by default such
that ranks that communicate most are neighbours. Stage k is on pipeline coordinate k % pipeline, and
messages between stages go to the rank with the same other coordinates. Where ZeRO shards over a
part of the data axis, that axis is two: replicate, and within it shard, so that the ranks whose
shards make up a full tensor are the nearer ones. "data" still names both together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import permutations, product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.planner.plan.axis_order import AXES, PARTS, coordinates, members, number_of
from graphaccel.planner.plan.plan import Plan

_NAMES = (*AXES, *PARTS)


def axes_of(name: Any) -> tuple[str, ...]:
    """The axis names in `data` or `data+tensor`; none for anything else."""
    parts = tuple(name.split("+")) if isinstance(name, str) else ()
    return parts if parts and all(part in _NAMES for part in parts) else ()


@dataclass
class Writes:
    """How many ops of the script, and of its optimizer, wrote into shards: as many on each rank
    that runs the same script."""

    count: int = 0


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and the groups it needs. A group of one rank is None: no
    communication.

    sizes: axis → devices, outermost first; "replicate" and "shard" in the place of "data" where
    that is two axes. groups: axis, or several joined by "+" in any order → the group of the ranks
    that differ from this one on those axes only.
    shared_groups: sorted pipeline coordinates → the group of those ranks within this replica.
    spread: the pipeline coordinates for which some ranks have such a group.
    channels: (source rank, destination rank, direction) → group (NCCL has no tags; gloo needs
    none).
    timeout: of every group (the default group has the script's).
    writes: into shards over this mesh.
    """

    rank: int
    sizes: dict[str, int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: timedelta = field(default_factory=lambda: timedelta(seconds=600))
    groups: dict[str, Any] = field(repr=False, default_factory=dict)
    shared_groups: dict[tuple[int, ...], Any] = field(repr=False, default_factory=dict)
    spread: set[tuple[int, ...]] = field(repr=False, default_factory=set)
    channels: dict[tuple[int, int, str], Any] = field(repr=False, default_factory=dict)
    writes: Writes = field(repr=False, compare=False, default_factory=Writes)

    def size(self, axes: str) -> int:
        """Devices on an axis, or on several joined by "+"."""
        return prod(self.sizes[axis] for axis in self._parts(axes))

    def coordinate(self, axes: str) -> int:
        """This rank's coordinate on an axis; on several, its rank in the group over them."""
        place = 0
        for axis in self._parts(axes):
            place = place * self.sizes[axis] + self._coordinates[axis]
        return place

    def group(self, axes: str) -> Any:
        """The group of the ranks along an axis, or several joined by "+"; created by `ensure`."""
        return self.groups[axes]

    def ranks(self, axes: str) -> list[int]:
        """The ranks of `group(axes)`, ordered by their coordinate."""
        return members(self.sizes, self._parts(axes), self._coordinates)

    def joined(self, names: Collection[str]) -> str:
        """Axes joined by "+", outermost first."""
        return "+".join(axis for axis in self.axes if axis in names)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `sizes`, outermost first."""
        return tuple(self.sizes)

    def _parts(self, axes: str) -> tuple[str, ...]:
        """The axes of `sizes` that one or several joined by "+" consist of, outermost first: the
        order in which torch numbers the ranks of a group."""
        named = {*axes_of(axes), *(PARTS if "data" in axes_of(axes) else ())}
        return tuple(axis for axis in self.sizes if axis in named)

    def ensure(self, wanted: Iterable[str]) -> None:
        """Create the groups that do not exist yet. Collective: all ranks ask for the same."""
        for axes in sorted(set(wanted) - set(self.groups)):
            names = self._parts(axes)
            others = [axis for axis in self.axes if axis not in names]
            for place in product(*(range(self.sizes[axis]) for axis in others)):
                ranks = members(self.sizes, names, dict(zip(others, place, strict=True)))
                group = new_group(ranks, self.timeout)
                if self.rank in ranks:
                    self.groups[axes] = group

    def ensure_shared(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Create the groups of ranks at several pipeline coordinates, given sorted, that do not
        exist yet. Collective: every rank asks for the same ones."""
        for pipeline in sorted({p for p in wanted if len(p) > 1} - set(self.spread)):
            self.spread.add(pipeline)
            for ranks in zip(*(self.holders(p) for p in pipeline), strict=True):
                group = new_group(list(ranks), self.timeout)
                if self.rank in ranks:
                    self.shared_groups[pipeline] = group

    @cached_property
    def _coordinates(self) -> dict[str, int]:
        return coordinates(self.sizes, self.rank)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @property
    def data(self) -> int:
        """Devices on the data axis."""
        return self.size("data")

    @property
    def pipeline(self) -> int:
        """Devices on the pipeline axis."""
        return self.sizes["pipeline"]

    @property
    def data_index(self) -> int:
        """This rank's coordinate on the data axis."""
        return self.coordinate("data")

    @property
    def pipeline_index(self) -> int:
        """This rank's coordinate on the pipeline axis."""
        return self._coordinates["pipeline"]

    @property
    def world_group(self) -> Any:
        """All ranks."""
        return self.groups["+".join(AXES)]

    @property
    def data_group(self) -> Any:
        """Ranks with the same stages and shards, and other parts of the batch."""
        return self.groups["data"]

    @property
    def pipeline_group(self) -> Any:
        """The ranks of one replica along the pipeline, each with its stages."""
        return self.groups["pipeline"]

    @property
    def other(self) -> str:
        """The other rank in words, if there is only one."""
        if self.world != 2:
            return ""
        stage = f" (stage {1 - self.pipeline_index})" if self.pipeline == 2 else ""
        return f"rank {1 - self.rank}{stage}"

    def rank_of(self, stage: int) -> int:
        """The rank of this replica that holds a stage."""
        place = {**self._coordinates, "pipeline": stage % self.pipeline}
        return number_of(self.sizes, place)

    def holders(self, pipeline: int) -> list[int]:
        """The ranks at a pipeline coordinate, ordered by their other coordinates."""
        others = [axis for axis in self.axes if axis != "pipeline"]
        return members(self.sizes, others, {"pipeline": pipeline})


def build_mesh(
    plan: Plan, shared: Iterable[tuple[int, ...]], device: torch.device, timeout: timedelta
) -> Mesh:
    """Create the groups that every program needs; every rank calls this with the same arguments.

    Others are created when a program with collectives over them comes (`Mesh.ensure`).
    shared: sets of stages that hold the same parameter.
    """
    if plan.devices == 1:
        return Mesh(0, plan.sizes, device, timeout)
    mesh = Mesh(dist.get_rank(), plan.sizes, device, timeout)
    mesh.ensure(["+".join(AXES), "data", "pipeline"])
    if plan.devices == plan.pipeline * plan.data:
        mesh.groups["pipeline+data"] = mesh.world_group
    else:
        mesh.ensure(["pipeline+data"])
    mesh.ensure_shared(tuple(sorted({s % plan.pipeline for s in stages})) for stages in shared)
    if dist.get_backend() == "nccl":
        _make_channels(mesh)
    return mesh


def new_group(ranks: list[int], timeout: timedelta) -> Any:
    """A group of some ranks, None for a single one. Collective over all ranks."""
    return dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None


def _make_channels(mesh: Mesh) -> None:
    """One communicator per ordered pair and direction: NCCL serialises messages on the same one."""
    for replica in zip(*(mesh.holders(p) for p in range(mesh.pipeline)), strict=True):
        for pair in permutations(replica, 2):
            for direction in ("forward", "backward"):
                group = dist.new_group(sorted(pair), timeout=mesh.timeout)
                mesh.channels[(*pair, direction)] = group
