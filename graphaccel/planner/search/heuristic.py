"""About how long the candidates of a large problem take, to look at the promising ones first.

Not a bound: a step of even stages that fills its devices as evenly as it computes, with as much of
its forward done again as memory asks for; with activations on the host, as is best with the copies
of what waits. What is guessed decides the order in which candidates are solved, never what is said
of them.
"""

from __future__ import annotations

from functools import reduce
from math import prod

import numpy as np

from graphaccel.planner.cluster.communication import send_seconds
from graphaccel.planner.plan.axis_orders import orders
from graphaccel.planner.search.bounds import Bounds, Columns, again_curve, over_parameters

_CROWDED = 1.5


def guess(bounds: Bounds, of: Columns, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of the best of each shape's recomputations, infinity where none seems to fit;
    whether it is far from fitting without computing anything again).

    What a graph that is not made yet would send is not known: layouts are then guessed too well.
    That context divides no parameter is: each device casts them all, reads them forward and
    backward and writes their gradients. least: the shapes' bounds with even stages.
    """
    layout, cluster = of.layout, bounds.problem.cluster
    known, sums = bounds.nearest(layout), bounds.sums(of)
    extra = layout.model_parallel_size // known.model_parallel_size
    parts = over_parameters(layout, known)
    held = bounds.resident(of) / parts
    waiting = in_flight(of) / of.pipeline / extra
    room = cluster.tensor_budget - held / of.pipeline - sums.passing / extra
    kept, lean = sums.kept * waiting, sums.lean * waiting
    shares, costs = bounds.alike(again_curve, known, int(of.small.min()))
    forward = (sums.work - sums.backward) / extra / of.pipeline
    if "activations" in bounds.offload:
        kept = lean = np.zeros_like(room)  # what stays of them is little
        assert cluster.host is not None
        each = of.pipeline * extra * cluster.host.link
        left = ((sums.kept - share * (sums.kept - sums.lean)) / each for share in shares.tolist())
        ways = zip(costs.tolist(), left, strict=True)
        slower = reduce(np.minimum, (forward * cost + _copied(up, forward) for cost, up in ways))
    else:
        again = np.clip((kept - room) / np.maximum(kept - lean, 1.0), 0.0, 1.0)
        slower = forward * np.interp(again, shares, costs)
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
    """Seconds that copies add to a microbatch: down beside its forward, and up again."""
    return copy + np.maximum(0.0, copy - forward)


def _sends(bounds: Bounds, of: Columns, size: np.ndarray) -> np.ndarray:
    """Seconds of a message of `size` bytes to the next stage, the order in which it takes least."""
    layout, cluster = of.layout, bounds.problem.cluster
    plan = bounds.plan(layout, data=2, pipeline=2)  # of several devices on both
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
    """Microbatches that the first rank holds of its stages."""
    ranks, each = of.pipeline, of.interleave
    most = 2 * (ranks - 1) + (each - 1) * ranks + 1
    several = np.minimum(of.microbatches * each, most) / each
    return np.where(each == 1, np.minimum(of.microbatches, ranks), several)
