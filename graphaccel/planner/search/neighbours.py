"""Where a large search looks: meshes of practice first, at the end the neighbours of the best.

`RECIPES` are meshes that are usual, as data: one plan of each is solved first. Those of dense
models are from the published runs of Megatron-LM (tensor in a node, pipeline between nodes, data
outside; Narayanan et al., 2021) and PyTorch FSDP (parameters sharded over all devices, or over a
node and replicated between nodes; Zhao et al., 2023). Mixtures: experts over a node or over many
nodes, optimizer state sharded, no tensor axis (DeepSeek-V3, arXiv 2412.19437, with a pipeline;
Qwen3). Long sequences: a context axis outside of the tensor axis (Llama 3, arXiv 2407.21783, table
4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from graphaccel.planner.plan.plan import INTERLEAVES, Plan
from graphaccel.planner.search.candidates import Layout, Shape

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


ONE, NODE, PART, MANY, ANY = "one", "node", "part of a node", "many", "any"
"""How large an axis is; `MANY` is more than one."""


@dataclass(frozen=True)
class Recipe:
    """The sizes of the axes, the levels of ZeRO, and over what ZeRO shards."""

    tensor: str
    pipeline: str
    context: str
    expert: str
    zeros: tuple[int, ...]
    shards: str = ANY

    def has(self, shape: Shape, node: int) -> bool:
        """Whether a candidate is such a mesh. node: devices that share the fastest links."""
        inner = shape.layout.model_parallel_size * (shape.shard_size or shape.data)
        return (
            self.has_layout(shape.layout, node)
            and _is(self.pipeline, shape.pipeline, node)
            and shape.zero in self.zeros
            and _is(self.shards, inner, node)
        )

    def has_layout(self, layout: Layout, node: int) -> bool:
        """Whether the axes that shard the graph have such sizes."""
        axes = ("tensor", "context", "expert")
        return all(_is(getattr(self, axis), getattr(layout, axis), node) for axis in axes)


RECIPES = (
    Recipe(ONE, ONE, ONE, ONE, zeros=(3,)),
    Recipe(ONE, ONE, ONE, ONE, zeros=(2, 3), shards=NODE),
    Recipe(NODE, ANY, ONE, ONE, zeros=(0, 1)),
    Recipe(PART, ANY, ONE, ONE, zeros=(0, 1)),
    Recipe(ONE, ONE, ONE, NODE, zeros=(1, 2, 3)),
    Recipe(ONE, MANY, ONE, NODE, zeros=(0, 1)),
    Recipe(ONE, ANY, ONE, MANY, zeros=(1,)),
    Recipe(NODE, ANY, MANY, ONE, zeros=(0, 1)),
)


def _is(said: str, size: int, node: int) -> bool:
    return {
        ONE: size == 1,
        NODE: size == node,
        PART: 1 < size < node,
        MANY: size > 1,
        ANY: True,
    }[said]
