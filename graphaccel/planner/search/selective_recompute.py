"""Selective recompute: which values a recomputed block saves, by minimum cut.

An option (`Way`) saves some values, and recomputes from them whatever else the backward reads. For
a given price of a second in bytes, the best option is a minimum cut: a value that is needed is cut
from the op that computes it (its bytes are saved), or the op from the sink (its seconds are spent
again) and then its inputs are needed too. The prices at which the best option changes are those of
the lower convex hull of (seconds, bytes), which is searched from its ends inwards.

The cut: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, as in torch's partitioner
(`torch._functorch.partitioners.min_cut_rematerialization_partition`); the hull: Eisner and
Severance, Mathematical techniques for efficient record segmentation, 1976.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov

from graphaccel.planner.profile.block_recompute import BlockKind
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile

MOST = 3
"""Options of a kind of block besides saving everything and recomputing everything."""
_TICKS = 1e12  # ticks per second: capacities are integers, so that a cut is exact


@dataclass(frozen=True)
class Way:
    """One recompute option. saved: positions of a block whose values are saved, by their order.
    less: by how many bytes it saves less for the backward than without recomputation. seconds:
    device seconds of the recomputation."""

    saved: tuple[int, ...]
    less: int
    seconds: float


def ways_of(profile: Profile, sized: SizedProfile) -> tuple[tuple[Way, ...], ...]:
    """For each kind of block its recompute options on the Pareto front of bytes and seconds, from
    the fewest seconds to the fewest bytes; only options that save less than no recomputation does.
    """
    return sized.analyses.cached((), _all_ways, profile, sized)


def leanest_of(profile: Profile, sized: SizedProfile) -> tuple[Way | None, ...]:
    """For each kind of block the last of its options, computed without the others; None without
    one."""
    return sized.analyses.cached((), _all_leanest, profile, sized)


def _all_ways(profile: Profile, sized: SizedProfile) -> tuple[tuple[Way, ...], ...]:
    return tuple(_ways(Body(profile, sized, kind)) for kind in profile.block_kinds)


def _all_leanest(profile: Profile, sized: SizedProfile) -> tuple[Way | None, ...]:
    return tuple(_leanest(Body(profile, sized, kind)) for kind in profile.block_kinds)


def _leanest(body: Body) -> Way | None:
    result = max((body.way(()), body.way(body.leanest())), key=lambda w: (w.less, -w.seconds))
    return result if result.less > 0 else None


def _ways(body: Body) -> tuple[Way, ...]:
    tried = {(), *body.hull()}
    results = sorted({body.way(saved) for saved in tried}, key=lambda w: (w.seconds, -w.less))
    front: list[Way] = []
    for way in results:
        if way.less > (front[-1].less if front else 0):
            front.append(way)
    return tuple(front)


class Body:
    """A kind of block at one microbatch size: the seconds of its ops and the bytes of its
    values."""

    def __init__(self, profile: Profile, sized: SizedProfile, kind: BlockKind) -> None:
        self.kind = kind
        self.seconds = sized.row_seconds[kind.rows[0]]
        self.ticks = np.rint(self.seconds * _TICKS).astype(np.int64).tolist()
        own, outer = sized.bytes[kind.makes[0]], sized.bytes[kind.outer]
        self.own, self.outer = own * kind.counted, outer * kind.owed
        self.kept = int(self.own[kind.back].sum())

    def way(self, saved: tuple[int, ...]) -> Way:
        """The bytes and seconds of saving these positions."""
        own, outer = self.kind.waiting(saved)
        size = int(self.own[own].sum() + self.outer[outer].sum())
        return Way(
            saved, self.kept - size, float(self.seconds[self.kind.recomputed_rows(saved)].sum())
        )

    def leanest(self) -> tuple[int, ...]:
        """The positions that are saved where bytes are all that counts."""
        return self.cut(sum(self.ticks) + 1, 1)

    def hull(self) -> list[tuple[int, ...]]:
        """The saved positions at the corners of the convex hull between its ends, those farthest
        from the line between their neighbours first, at most `MOST` of them."""
        few = self.leanest()
        spans = [(self.point(None), self.point(few))]
        results = [few]
        while spans and len(results) <= MOST:
            (time, size), (end, least) = spans.pop(0)
            rise, run = size - least, end - time
            if rise <= 0 or run <= 0:
                continue
            saved = self.cut(run, rise)
            middle = self.point(saved)
            gain = run * size + rise * time - run * middle[1] - rise * middle[0]
            if gain <= 0:
                continue
            results.append(saved)
            spans += [((time, size), middle), (middle, (end, least))]
            spans.sort(key=lambda span: _area(*span), reverse=True)
        return results

    def point(self, saved: tuple[int, ...] | None) -> tuple[int, int]:
        """(ticks, bytes) of an option; None: nothing is recomputed."""
        if saved is None:
            return 0, self.kept
        done = zip(self.ticks, self.kind.recomputed_rows(saved).tolist(), strict=True)
        return sum(t for t, recomputed in done if recomputed), self.kept - self.way(saved).less

    def cut(self, a_byte: int, a_tick: int) -> tuple[int, ...]:
        """The positions whose values are saved at these prices of a byte and a tick."""
        kind, graph = self.kind, nx.DiGraph()
        count = len(kind.maker)
        source, sink = "wanted", "spent"
        graph.add_nodes_from((source, sink))  # values are numbers from 0 on, ops from -1 down
        for storage, row in enumerate(kind.maker.tolist()):
            if kind.back[storage]:
                graph.add_edge(source, storage)
            whole: dict[str, Any] = {"capacity": int(self.own[storage]) * a_byte}
            if kind.fixed[row] or kind.beyond[storage]:
                if not kind.back[storage]:  # otherwise it is held for the backward anyway
                    graph.add_edge(storage, sink, **whole)
            else:
                unsaved = kind.sent[row] or not kind.counted[storage]
                graph.add_edge(storage, ~row, **({} if unsaved else whole))
        for storage, size in enumerate(self.outer.tolist(), count):
            if size:
                graph.add_edge(storage, sink, capacity=size * a_byte)
        for row, ticks in enumerate(self.ticks):
            if not kind.fixed[row]:
                graph.add_edge(~row, sink, capacity=ticks * a_tick)
        for row, storage in zip(*(column.tolist() for column in kind.reads), strict=True):
            if not kind.fixed[row]:
                graph.add_edge(~row, storage)
        _, (wanted, _) = nx.minimum_cut(graph, source, sink, flow_func=boykov_kolmogorov)
        saved = {
            int(kind.at[row])
            for storage, row in enumerate(kind.maker.tolist())
            if storage in wanted and ~row not in wanted and not kind.fixed[row]
        }
        return tuple(sorted(saved))


def _area(left: tuple[int, int], right: tuple[int, int]) -> int:
    return (right[0] - left[0]) * (left[1] - right[1])
