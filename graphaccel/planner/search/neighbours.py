"""The candidates that differ from one in a single decision, for a search around the best."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from graphaccel.planner.plan.plan import INTERLEAVES, Plan
from graphaccel.planner.search.candidates import Shape

_AXES = ("tensor", "context", "expert", "data", "pipeline")
_ZEROS = (
    (0, "always", "whole"),
    (1, "always", "whole"),
    *((2, "always", kind) for kind in ("whole", "shards")),
    *((3, again, kind) for again in ("always", "never", "once_per_step")
      for kind in ("whole", "shards")),
)  # fmt: skip


def shape_of(plan: Plan) -> Shape:
    """The candidate of a plan, without its recompute choice."""
    names = (name for name in Shape._fields if name != "recompute")
    return Shape(recompute="", **{name: getattr(plan, name) for name in names})


def neighbours(shape: Shape, shard_sizes: tuple[int, ...] = (0,)) -> Iterator[Shape]:
    """Shapes that move a factor of two from one axis to another, and those with another number of
    microbatches, interleaving, schedule, level of ZeRO or shard size; some may be no candidates.
    shard_sizes: those to try."""
    for source, target in permutations(_AXES, 2):
        if getattr(shape, source) % 2 == 0:
            sizes = {source: getattr(shape, source) // 2, target: getattr(shape, target) * 2}
            yield from _settled(shape._replace(**sizes), shape)
    for microbatches in _halved_and_doubled(shape.microbatches):
        yield shape._replace(microbatches=microbatches)
    if shape.pipeline > 1:
        for interleave in INTERLEAVES:
            for schedule in ("1f1b", "zero_bubble") if interleave == 1 else ("interleaved",):
                yield shape._replace(interleave=interleave, schedule=schedule)
    for zero, repeated, kind in _ZEROS:
        yield shape._replace(zero=zero, reshard_after_forward=repeated, accumulation=kind,
                             shard_size=shape.shard_size if zero else 0)  # fmt: skip
    for size in shard_sizes:
        yield shape._replace(shard_size=size)


def _settled(moved: Shape, before: Shape) -> Iterator[Shape]:
    """The shape with other axes, with the decisions that they leave: microbatches of the same size,
    or half or twice it, no ZeRO without a data axis, no schedule without a pipeline."""
    if moved.data == 1:
        moved = moved._replace(
            zero=0, reshard_after_forward="always", accumulation="whole", shard_size=0
        )
    if moved.shard_size and moved.data % moved.shard_size:
        moved = moved._replace(shard_size=0)
    schedules = [(moved.interleave, moved.schedule)]
    if moved.pipeline == 1:
        schedules = [(1, "1f1b")]
    elif before.pipeline == 1:
        schedules = [(1, "1f1b"), (1, "zero_bubble"), (2, "interleaved")]
    same = moved.microbatches * before.data // moved.data
    for microbatches in dict.fromkeys((same, *_halved_and_doubled(same), moved.microbatches)):
        for interleave, schedule in schedules:
            yield moved._replace(
                microbatches=microbatches, interleave=interleave, schedule=schedule
            )


def _halved_and_doubled(number: int) -> tuple[int, ...]:
    return (number // 2, 2 * number) if number % 2 == 0 else (2 * number,)
