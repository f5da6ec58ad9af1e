"""About how long the candidates of a large problem take, to look at the promising ones first.

Not a bound: a step of even stages that fills its devices as evenly as it computes, with as much of
its forward done again as memory asks for. What is guessed decides the order in which candidates are
solved, never what is said of them.
"""

from __future__ import annotations

import math

from graphaccel.planner.candidates import Bounds, Shape
from graphaccel.planner.communication import send_seconds
from graphaccel.planner.solve import Problem, resident_parts


def guess(
    problem: Problem, bounds: Bounds, shape: Shape, batch: int, least: float | None = None
) -> float:
    """Seconds of the best of a shape's recomputations; infinity where none seems to fit.

    What a graph that is not made yet would send is not known: layouts are then guessed too well.
    least: the shape's bound, where it is known.
    """
    layout = shape.layout
    known = bounds.nearest(layout)
    sums = bounds.sums(known, shape.microbatch_size(batch))
    extra = layout.replica // known.replica
    held = resident_bytes(shape, sums.held, sums.trained, bounds.device_state, bounds.gathered)
    held *= layout.context / known.context / extra  # the context axis shards no parameters
    waiting = in_flight(shape) / shape.pipeline / extra
    room = problem.cluster.tensor_budget - held / shape.pipeline - sums.passing / extra
    kept, lean = sums.kept * waiting, sums.lean * waiting
    if "activations" in bounds.offload:
        kept = lean = 0.0  # what stays of them is little
    if lean > room:
        return math.inf
    again = min(1.0, max(0.0, (kept - room) / max(kept - lean, 1.0)))
    slower = again * (sums.work - sums.backward) / extra / shape.pipeline
    sent = 0.0
    if shape.pipeline > 1:
        stages = shape.pipeline * shape.interleave
        size = sums.crossing / layout.context * known.context
        far = layout.replica * shape.data
        sent = 2 * (stages - 1) * send_seconds(problem.cluster, size, 0, far)
    waits = (shape.pipeline - 1) / shape.interleave
    if least is None:
        least = bounds.seconds(shape)
    return least + (shape.microbatches + waits) * slower + sent


def resident_bytes(
    shape: Shape, held: int, trained: int, optimizer_bytes: int, gathered: float
) -> float:
    """Bytes of parameters, gradients and optimizer state of all stages together."""
    parts = resident_parts(shape, optimizer_bytes, gathered)
    found = held * parts[0] + trained * parts[2]
    if (shape.microbatches > 1 or shape.data > 1) and (shape.zero < 2 or shape.microbatches > 1):
        found += trained * parts[1]
    return found


def in_flight(shape: Shape) -> float:
    """Microbatches that the first rank holds of its stages."""
    ranks, each = shape.pipeline, shape.interleave
    if each == 1:
        return min(shape.microbatches, ranks)
    return min(shape.microbatches * each, 2 * (ranks - 1) + (each - 1) * ranks + 1) / each
