"""Estimates how long the candidates of a large problem take, to solve promising ones first.

It is no bound: it assumes even stages, memory filled as evenly as compute, and as much of the
forward recomputed as memory requires; with activations offloaded, the best trade-off between
recomputation and copies of saved values. The estimate only decides the order in which candidates
are solved, never their predicted time.
"""

from __future__ import annotations

from functools import reduce
from math import prod

import numpy as np

from graphaccel.planner.cluster.communication import send_seconds
from graphaccel.planner.plan.axis_orders import orders
from graphaccel.planner.search.bounds import Bounds, over_parameters, recompute_curve
from graphaccel.planner.search.candidate_columns import Columns

_CROWDED = 1.5


def estimate_best(bounds: Bounds, of: Columns, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of each shape's best recompute choice, infinity where none seems to fit; whether it
    is far from fitting without recomputation).

    Collectives of a graph that is not built yet are not known, so the estimate is too low for such
    layouts. That the context axis divides no parameter is known: each device casts all parameters,
    reads them in forward and backward and writes their gradients. least: the shapes' bounds with
    even stages.
    """
    layout, cluster = of.layout, bounds.problem.cluster
    known, sums = bounds.nearest(layout), bounds.sums(of)
    extra = layout.model_parallel_size // known.model_parallel_size
    parts = over_parameters(layout, known)
    held = bounds.resident(of) / parts
    waiting = in_flight(of) / of.pipeline / extra
    room = cluster.tensor_budget - held / of.pipeline - sums.passing / extra
    kept, lean = sums.kept * waiting, sums.lean * waiting
    shares, costs = bounds.cached(recompute_curve, known, int(of.small.min()))
    forward = (sums.work - sums.backward) / extra / of.pipeline
    if "activations" in bounds.offload:
        kept = lean = np.zeros_like(room)  # the part of them that stays on the device is small
        assert cluster.host is not None
        each = of.pipeline * extra * cluster.host.link
        left = ((sums.kept - share * (sums.kept - sums.lean)) / each for share in shares.tolist())
        ways = zip(costs.tolist(), left, strict=True)
        slower = reduce(np.minimum, (forward * cost + _copied(up, forward) for cost, up in ways))
    else:
        recomputed = np.clip((kept - room) / np.maximum(kept - lean, 1.0), 0.0, 1.0)
        slower = forward * np.interp(recomputed, shares, costs)
    stages = of.pipeline * of.interleave
    size = sums.crossing / layout.context * known.context
    sends = _sends(bounds, of, size)
    waits = (of.pipeline - 1) / of.interleave
    precision = bounds.plan(layout).precision
    read = sums.held * (0.5 if precision.compute != "float32" else 1.0)
    whole = (3 * read / cluster.device.memory_bandwidth + 2 * sums.casts) * (1 / parts - 1 / extra)
    slower = slower + whole / of.pipeline
    about = least + (of.microbatches + waits) * slower + 2 * (stages - 1) * sends
    return np.where(lean > room, np.inf, about), kept > _CROWDED * np.maximum(room, 0.0)


def _copied(copy: np.ndarray, forward: np.ndarray) -> np.ndarray:
    """Seconds that copies add to a microbatch: to the host beside its forward, and back."""
    return copy + np.maximum(0.0, copy - forward)


def _sends(bounds: Bounds, of: Columns, size: np.ndarray) -> np.ndarray:
    """Seconds of a message of `size` bytes to the next stage, in the axis order in which it is
    fastest."""
    layout, cluster = of.layout, bounds.problem.cluster
    plan = bounds.plan(layout, data=2, pipeline=2)  # with several devices on both axes
    least = np.full(len(size), np.inf)
    for order in orders(cluster, plan):
        apart = prod(
            (of.data if axis == "data" else getattr(layout, axis)
             for axis in order[order.index("pipeline") + 1 :]),
            start=np.ones_like(of.data),
        )  # fmt: skip
        far = np.where(of.pipeline > 1, apart, 0).tolist()
        pairs = list(zip(size.tolist(), far, strict=True))
        one = {pair: send_seconds(cluster, pair[0], 0, pair[1]) for pair in set(pairs)}
        least = np.minimum(least, [one[pair] for pair in pairs])
    return least


def in_flight(of: Columns) -> np.ndarray:
    """Microbatches in flight on the first rank, in units of its stages."""
    ranks, each = of.pipeline, of.interleave
    most = 2 * (ranks - 1) + (each - 1) * ranks + 1
    several = np.minimum(of.microbatches * each, most) / each
    return np.where(each == 1, np.minimum(of.microbatches, ranks), several)
