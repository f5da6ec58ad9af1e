"""Which device stands where: the order of the mesh axes over the devices' numbers.

Axes from the outside in, the last one innermost: with sizes n0, n1, ... and coordinates c0, c1, ...

    number = (c0 * n1 + c1) * n2 + ...

so that neighbours on the last axis are neighbouring devices, which share a node, and those on the
first are furthest apart. As they usually are, what says most to each other is nearest (the order of
Megatron-LM: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, §3.4): pipeline, data, expert, context, tensor. Where ZeRO shards over a part
of the data axis, that is two in its place, replicate and within it shard.

Sizes are mappings, axis → devices, in that order. Everything that asks which device is whose
neighbour, process groups and prices alike, asks here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from math import prod

AXES = ("pipeline", "data", "expert", "context", "tensor")
"""The mesh axes in their usual order, from the outside in."""
PARTS = ("replicate", "shard")
"""Of the data axis, from the outside in, where ZeRO shards over a part of it."""

Group = tuple[int, int, tuple[tuple[int, int], ...]]
"""(devices, how far apart they are, further pairs): numbers 0, stride, 2 * stride, ...; with a
further pair all of that again as often as it says, so far apart; from the inside out."""


def coordinates(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """A device's place on each axis."""
    found = {}
    for axis in reversed(sizes):  # type: ignore[call-overload]
        number, found[axis] = divmod(number, sizes[axis])
    return found


def number_of(sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """The device at these coordinates; 0 on an axis that is left out."""
    number = 0
    for axis, size in sizes.items():
        number = number * size + place.get(axis, 0)
    return number


def members(sizes: Mapping[str, int], along: Collection[str], at: Mapping[str, int]) -> list[int]:
    """Devices that take every coordinate on `along` and stand at `at` on the other axes, ascending
    in their number."""
    axes = [axis for axis in sizes if axis in along]
    places = product(*(range(sizes[axis]) for axis in axes))
    return [number_of(sizes, {**at, **dict(zip(axes, place, strict=True))}) for place in places]


def stride(sizes: Mapping[str, int], axis: str) -> int:
    """How far apart neighbours on an axis are, in device numbers."""
    axes = list(sizes)
    return prod(sizes[inner] for inner in axes[axes.index(axis) + 1 :])


def group_of(axes: Iterable[tuple[int, int]]) -> Group:
    """The devices along some axes, (devices, stride) of each. One device where there are none."""
    found: list[tuple[int, int]] = []
    for size, apart in sorted((one for one in axes if one[0] > 1), key=lambda one: one[1]):
        if found and found[-1][0] * found[-1][1] == apart:  # contiguous
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, apart))
    first, *further = found or [(1, 1)]
    return (*first, tuple(further))
