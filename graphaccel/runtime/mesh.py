"""Process groups of a mesh with named axes: who talks to whom.

Axes from the outside in: pipeline, data, expert, context, tensor. With coordinates p, d, e, c, t

    rank = (((p * data + d) * expert + e) * context + c) * tensor + t

so that ranks that say most to each other are neighbours. Stage k lies on pipeline coordinate
k % pipeline, and messages between stages go to the rank with the same other coordinates. Where ZeRO
shards over a part of the data axis, that is two: replicate, and within it shard,

    d = r * shard + s

so that the ranks whose shards make a whole are the nearer ones. "data" still names both together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.planner.plan import Plan

AXES = ("pipeline", "data", "expert", "context", "tensor")
_PARTS = ("replicate", "shard")  # of the data axis, from the outside in
_ORDER = ("pipeline", "data", *_PARTS, "expert", "context", "tensor")


def axes_of(name: Any) -> tuple[str, ...]:
    """The axes in `data` or `data+tensor`; none for anything else."""
    parts = tuple(name.split("+")) if isinstance(name, str) else ()
    return parts if parts and all(part in _ORDER for part in parts) else ()


@dataclass(frozen=True)
class Mesh:
    """This rank's place and the groups it needs. A group of one is None: nothing to say.

    sizes: axis → devices; "replicate" and "shard" in the place of "data" where that is two axes.
    groups: axis, or several joined by "+" from the outside in → the group of the
    ranks that differ from this one on those axes only.
    shared_groups: sorted pipeline coordinates → the group of those ranks within this replica.
    channels: (source rank, destination rank, direction) → group (NCCL knows no tags; gloo needs
    none).
    timeout: of every group (the default group has the script's).
    """

    rank: int
    sizes: dict[str, int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: timedelta = field(default_factory=lambda: timedelta(seconds=600))
    groups: dict[str, Any] = field(repr=False, default_factory=dict)
    shared_groups: dict[tuple[int, ...], Any] = field(repr=False, default_factory=dict)
    channels: dict[tuple[int, int, str], Any] = field(repr=False, default_factory=dict)

    def size(self, axes: str) -> int:
        """Devices on an axis, or on several joined by "+"."""
        return prod(self.sizes[axis] for axis in self._parts(axes))

    def coordinate(self, axes: str) -> int:
        """This rank's place on an axis; on several, counted with the last one innermost."""
        place = 0
        for axis in self._parts(axes):
            place = place * self.sizes[axis] + self._coordinates[axis]
        return place

    def group(self, axes: str) -> Any:
        """The group of the ranks along an axis, or several joined by "+". It was asked for."""
        return self.groups[axes]

    def ranks(self, axes: str) -> list[int]:
        """The ranks of `group(axes)`, in the order of their coordinate."""
        return _ranks(self.sizes, self._parts(axes), self._coordinates)

    def joined(self, names: Collection[str]) -> str:
        """Axes from the outside in, joined by "+"."""
        return "+".join(axis for axis in self.axes if axis in names)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `sizes`, from the outside in."""
        return _outside_in(self.sizes)

    def _parts(self, axes: str) -> tuple[str, ...]:
        """The axes of `sizes` that one or several joined by "+" consist of."""
        split = "data" not in self.sizes
        named = (_PARTS if split and axis == "data" else (axis,) for axis in axes_of(axes))
        return tuple(part for parts in named for part in parts)

    def ensure(self, wanted: Iterable[str]) -> None:
        """Make the groups that are not there yet. Collective: every rank asks for the same ones."""
        for axes in sorted(set(wanted) - set(self.groups)):
            names = self._parts(axes)
            others = [axis for axis in self.axes if axis not in names]
            for place in product(*(range(self.sizes[axis]) for axis in others)):
                ranks = _ranks(self.sizes, names, dict(zip(others, place, strict=True)))
                group = new_group(ranks, self.timeout)
                if self.rank in ranks:
                    self.groups[axes] = group

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
        """This rank's place on the data axis."""
        return self.coordinate("data")

    @property
    def pipeline_index(self) -> int:
        """This rank's place on the pipeline axis."""
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
        """Ranks that hold one replica together, a stage each."""
        return self.groups["pipeline"]

    @property
    def other(self) -> str:
        """The other rank in words, where there is only one."""
        if self.world != 2:
            return ""
        stage = f" (stage {1 - self.pipeline_index})" if self.pipeline == 2 else ""
        return f"rank {1 - self.rank}{stage}"

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage of this rank's replica."""
        inner = self.world // self.pipeline
        return (stage % self.pipeline) * inner + self.rank % inner


def coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """A rank's place on each axis."""
    found = {}
    for axis in reversed(_outside_in(sizes)):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def _outside_in(sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in _ORDER if axis in sizes)


def _ranks(sizes: dict[str, int], along: tuple[str, ...], at: dict[str, int]) -> list[int]:
    """Ranks that take every coordinate on `along` and stand at `at` on the other axes."""
    ranks = []
    for place in product(*(range(sizes[axis]) for axis in along)):
        coordinate = {**at, **dict(zip(along, place, strict=True))}
        rank = 0
        for axis in _outside_in(sizes):
            rank = rank * sizes[axis] + coordinate[axis]
        ranks.append(rank)
    return ranks


def build_mesh(
    plan: Plan, shared: Iterable[tuple[int, ...]], device: torch.device, timeout: timedelta
) -> Mesh:
    """Make the groups that every program needs; every rank calls this with the same arguments.

    Others are made when a program with collectives over them comes (`Mesh.ensure`).
    shared: sets of stages that hold the same parameter.
    """
    sizes = _sizes(plan)
    if plan.devices == 1:
        return Mesh(0, sizes, device, timeout)
    mesh = Mesh(dist.get_rank(), sizes, device, timeout)
    mesh.ensure(["+".join(AXES), "data", "pipeline"])
    if plan.devices == plan.pipeline * plan.data:
        mesh.groups["pipeline+data"] = mesh.world_group
    else:
        mesh.ensure(["pipeline+data"])
    inner = mesh.world // mesh.pipeline
    places = sorted({tuple(sorted({s % plan.pipeline for s in stages})) for stages in shared})
    for pipeline in places:
        for r in range(inner):
            ranks = [p * inner + r for p in pipeline]
            group = new_group(ranks, timeout)
            if mesh.rank in ranks:
                mesh.shared_groups[pipeline] = group
    if dist.get_backend() == "nccl":
        _make_channels(mesh, inner)
    return mesh


def _sizes(plan: Plan) -> dict[str, int]:
    """Axis → devices, from the outside in."""
    sizes = {}
    for axis in AXES:
        if axis == "data" and plan.replicas > 1:
            sizes |= {"replicate": plan.replicas, "shard": plan.shards}
        else:
            sizes[axis] = getattr(plan, axis)
    return sizes


def new_group(ranks: list[int], timeout: timedelta) -> Any:
    """A group of some ranks, None for one alone. Collective over all ranks."""
    return dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None


def _make_channels(mesh: Mesh, inner: int) -> None:
    """One communicator per ordered pair and direction: NCCL serialises what shares one."""
    for r in range(inner):
        for source, destination in product(range(mesh.pipeline), repeat=2):
            if source == destination:
                continue
            pair = (source * inner + r, destination * inner + r)
            for direction in ("forward", "backward"):
                group = dist.new_group(sorted(pair), timeout=mesh.timeout)
                mesh.channels[(*pair, direction)] = group
