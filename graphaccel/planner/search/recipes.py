"""Meshes that are usual in practice, as data: a large search solves one plan of each first.

dense: from the published runs of Megatron-LM (tensor in a node, pipeline between nodes, data
outside; Narayanan et al., 2021), PyTorch FSDP (parameters sharded over all devices, or over a node
and replicated between nodes; Zhao et al., 2023). Mixtures: experts over a node or over many nodes,
optimizer state sharded, no tensor axis (DeepSeek-V3, arXiv 2412.19437, with a pipeline; Qwen3).
Long sequences: a context axis outside of the tensor axis (Llama 3, arXiv 2407.21783, table 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.planner.search.candidates import Layout, Shape

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
