"""Mesh axis order: maps device numbers to coordinates on the axes, innermost axis last.

Axes are listed outermost first. With sizes n0, n1, ... and coordinates c0, c1, ...

    number = (c0 * n1 + c1) * n2 + ...

so neighbours on the last axis are devices with adjacent numbers, which share a node, and neighbours
on the first axis are furthest apart. In the usual order the axes that communicate most are
innermost (the order of Megatron-LM: Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021, §3.4): pipeline, data, expert, context,
tensor. Where ZeRO shards over a part of the data axis, two axes replace it: replicate, and inside
it shard.

Sizes are mappings, axis → devices, in that order. Whatever depends on which devices are neighbours,
process groups as well as communication costs, uses this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from math import prod

AXES = ("pipeline", "data", "expert", "context", "tensor")
"""The mesh axes in their usual order, outermost first."""
PARTS = ("replicate", "shard")
"""The two parts of the data axis, outermost first, where ZeRO shards over a part of it."""

Group = tuple[int, int, tuple[tuple[int, int], ...]]
"""(devices, stride, further pairs): the device numbers 0, stride, 2 * stride, ... Each further pair
(repeats, stride) repeats all of them that many times at that stride; innermost first."""


def coordinates(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """A device's coordinate on each axis."""
    results = {}
    for axis in reversed(sizes):  # type: ignore[call-overload]
        number, results[axis] = divmod(number, sizes[axis])
    return results


def number_of(sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """The number of the device at these coordinates; an axis that is left out has coordinate 0."""
    number = 0
    for axis, size in sizes.items():
        number = number * size + place.get(axis, 0)
    return number


def members(sizes: Mapping[str, int], along: Collection[str], at: Mapping[str, int]) -> list[int]:
    """Device numbers, ascending, over all coordinates on the axes `along`, at the coordinates `at`
    on the other axes."""
    axes = [axis for axis in sizes if axis in along]
    places = product(*(range(sizes[axis]) for axis in axes))
    return [number_of(sizes, {**at, **dict(zip(axes, place, strict=True))}) for place in places]


def stride(sizes: Mapping[str, int], axis: str) -> int:
    """The stride of an axis: the difference between the device numbers of neighbours on it."""
    axes = list(sizes)
    return prod(sizes[inner] for inner in axes[axes.index(axis) + 1 :])


def group_of(axes: Iterable[tuple[int, int]]) -> Group:
    """The group of devices along some axes, given as (devices, stride) of each; one device without
    axes."""
    results: list[tuple[int, int]] = []
    for size, apart in sorted((one for one in axes if one[0] > 1), key=lambda one: one[1]):
        if results and results[-1][0] * results[-1][1] == apart:  # contiguous
            results[-1] = results[-1][0] * size, results[-1][1]
        else:
            results.append((size, apart))
    first, *further = results or [(1, 1)]
    return (*first, tuple(further))
