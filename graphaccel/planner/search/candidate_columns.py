"""Candidates of one layout as columns, and the seconds that the devices of their pipelines wait.

A large problem has a hundred thousand candidates: what bounds compute of them, they compute of
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from graphaccel.planner.plan.pins import RESHARDS
from graphaccel.planner.search.candidates import Layout, Shape

_STEP = RESHARDS.index("once_per_step")


@dataclass(frozen=True, eq=False)
class Columns:
    """Shapes of one layout as columns, field by field. again: index in `RESHARDS`; shards: whether
    gradients are reduced in each microbatch; small: examples of a microbatch; apart: whether the
    schedule computes the gradients of weights separately; gpipe: whether all its forwards are
    before its backwards; over: number of devices over which ZeRO shards. order: the rank of each by
    `Shape.order`. ends: the smallest and the largest microbatch of the layout."""

    layout: Layout
    ends: tuple[int, int]
    microbatches: np.ndarray
    pipeline: np.ndarray
    interleave: np.ndarray
    data: np.ndarray
    zero: np.ndarray
    reshard: np.ndarray
    shards: np.ndarray
    small: np.ndarray
    apart: np.ndarray
    gpipe: np.ndarray
    over: np.ndarray
    order: np.ndarray

    def of(self, rows: np.ndarray) -> Columns:
        """A subset of the rows."""
        names = [field.name for field in fields(self) if field.name not in ("layout", "ends")]
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def once(self) -> np.ndarray:
        """Whether gradients are reduced as soon as they are computed."""
        return (self.microbatches == 1) | self.shards

    @property
    def held(self) -> np.ndarray:
        """Whether parameters that ZeRO 3 gathers are held for all microbatches."""
        return (self.zero == 3) & (self.data > 1) & (self.reshard == _STEP)

    @cached_property
    def sizes(self) -> tuple[list[int], np.ndarray]:
        """The distinct microbatch sizes, ascending, and the index of each row's size."""
        sizes, place = np.unique(self.small, return_inverse=True)
        return sizes.tolist(), place

    @cached_property
    def over_data(self) -> tuple[list[list[int]], np.ndarray]:
        """The distinct values of what traffic over data depends on, (data, pipeline, ZeRO up to 2,
        devices over which it shards), and the index of each row's."""
        asked = np.stack([self.data, self.pipeline, np.minimum(self.zero, 2), self.over])
        kinds, place = np.unique(asked, axis=1, return_inverse=True)
        return kinds.T.tolist(), place


def columns(shapes: Sequence[Shape], batch: int) -> Columns:
    """The columns of shapes, all of one layout."""
    rows = [
        (s.microbatches, s.pipeline, s.interleave, s.data, s.zero,
         RESHARDS.index(s.reshard_after_forward),
         s.accumulation == "shards", s.microbatch_size(batch), s.schedule == "zero_bubble",
         s.schedule == "gpipe", s.shard_size or s.data)
        for s in shapes
    ]  # fmt: skip
    result = np.array(rows, dtype=np.int64).reshape(-1, 11).T
    held = result[6] > 0, result[7], result[8] > 0, result[9] > 0, result[10]
    order = np.empty(len(shapes), dtype=np.int64)
    order[sorted(range(len(shapes)), key=lambda i: shapes[i].order)] = np.arange(len(shapes))
    values: Any = (*result[:6], *held, order)
    return Columns(shapes[0].layout, (int(held[1].min()), int(held[1].max())), *values)


def least_idle(of: Columns, work: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Lower bound on the seconds that a device idles in the pipeline, for any cuts and any
    distribution of forward and backward over the stages. work: seconds of a microbatch on all S
    stages; weight: of it, what can run separately (gradients of weights).

    1F1B with m > S microbatches: rank r idles for the stages before it, and twice for the stages
    after it, except for the S - 1 - r microbatches it has in flight there. With those multiples of
    these S inequalities that make all stages' coefficients equal, no cuts beat even ones: m + S - 1
    times an S-th of the work. With m <= S microbatches, where the first rank runs all forwards
    while it waits: 2 S / (2 S - m + 1) times the work. GPipe runs all forwards, then all backwards:
    the even form for any m. Interleaved: `_interleaved_times`; even stages are not optimal: with 2
    ranks of 2 stages each, 4 microbatches take 2.25 times the work, and 2.133 times with forwards
    of 3, 3, 3, 6 and backwards of 5, 5, 5, 0. Gradients of weights that are apart may fill what is
    idle. Never more than the closed form of `planner.estimate.estimate`, which ranks the candidates
    first.
    """
    m, ranks = of.microbatches, of.pipeline
    even = (m + ranks - 1) / ranks
    few = 2 * ranks / (2 * ranks - np.minimum(m, ranks) + 1)
    times = np.where(of.gpipe | (m > ranks), even, few)
    several = np.maximum(1.0, _interleaved_times(m, ranks, of.interleave))
    times = np.where(of.interleave > 1, several, np.where(of.apart, 1.0, times))
    idle = np.maximum(0.0, times * work - m * work / ranks)
    certain = np.where(of.apart, np.maximum(0.0, idle - weight), idle)
    return np.minimum(certain, even_idle(of, work, weight))  # no more than in the closed form


def _interleaved_times(m: np.ndarray, ranks: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Lower bound on the seconds of an interleaved schedule per second of work, for any stages.

    For each chunk k (of v) and rank r: before rank r runs the first microbatch of its stage of
    chunk k, that microbatch passes all stages before; from then until the last microbatch's
    backward there it runs all its work but that of chunks below k of n = min(m, ranks)
    microbatches; then that microbatch passes the stages before. Averaged over k, and over ranks
    with weights that grow by 1 / (1 - 1 / (v m)) from rank to rank, each stage has the same
    coefficient c, but for what the first microbatches of a rank of more weight than 1 / n take off.
    """
    c = 1 / (each * -np.expm1(ranks * np.log1p(-1 / np.maximum(each * m, 2))))
    return c + (1 - 1 / each) * np.minimum(0.0, 1 - np.minimum(m, ranks) * c / m)


def even_idle(of: Columns, work: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The idle seconds of stages that take equally long."""
    idle = (work - work / of.pipeline) / of.interleave
    return np.where(of.apart, np.maximum(0.0, idle - 2 * weight), idle)
