"""Join or sum the parts of the batch before a step's whole-batch head, and slice its results.

before (one graph, 2 parts)                      after
  %z: f32[8,4] = ...            # forward          %z: f32[4,4] = ...           # forward
  %s: f32[8,8] = aten.mm(%z, %z_t)                 %w: f32[8,4] = whole_batch(%z, "joined", 0, 1, 2)
  ...                                              %s: f32[8,8] = aten.mm(%w, ...)         # head
  %g: f32[8,4] = aten.mm(...)   # backward         %g: f32[8,4] = aten.mm(...)             # head
  %h: f32[8,4] = aten.mul(%g, %y)                  %p: f32[4,4] = batch_part(%g, 0, 1, 2)
                                                   %h: f32[4,4] = aten.mul(%p, %y)

The head (`sharding.rules.head`) is the part of a step that runs once on the whole batch.
`two_pass_head` moves the nodes between `whole_batch` and `batch_part` out of the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphaccel.ir.calls import is_random
from graphaccel.sharding.rules.batch_placement import PARTIAL, BatchPlacement
from graphaccel.sharding.rules.parts import JOINED, PART, SAME, SUMMED, WHOLE
from graphaccel.sharding.rules.shard import Shard

aten = torch.ops.aten


class Around:
    """Builds the nodes that lead into and out of the head.

    graph: of one part of the batch, to which the nodes are added. kinds: of placeholders. own:
    whole value → a part's slice; whole: value → what the head reads.
    """

    def __init__(
        self, graph: fx.Graph, placed: BatchPlacement, kinds: Mapping[fx.Node, str], parts: int
    ) -> None:
        self.graph, self.placed, self.kinds, self.parts = graph, placed, kinds, parts
        self.own: dict[fx.Node, fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.free: dict[fx.Node, bool] = {}

    def inside(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """What the head reads for a value. new: the value in the graph of a part."""
        if node in self.placed.head:
            return new
        if node not in self.whole:
            place = self.placed.places[node]
            sharded = isinstance(place, (int, Shard))
            buffer = node.op == "placeholder" and self.kinds[node] == "buffer"
            if node in self.placed.hoisted or buffer:
                return new
            if not sharded and place != PARTIAL and self._is_free(node):
                return new
            how = JOINED if sharded else SUMMED if place == PARTIAL else SAME
            if node in self.placed.reduced:
                how = SAME
            at = sharded_dim(place) if how == JOINED else (0, 1)
            if new.op == "placeholder":  # a parameter: the forward may have gathered it
                new = self._added(aten.clone.default, (new,), node, "for the whole batch")
                new.meta["phase"] = "forward"
            built = self._added(WHOLE, (new, how, *at, self.parts), node, "of all parts")
            built.meta |= {"head": True, "phase": "backward"}
            self.whole[node] = built
        return self.whole[node]

    def _is_free(self, node: fx.Node) -> bool:
        """Whether every stage can compute a value itself: from constants and the batch alone."""
        if node.op == "placeholder":
            return self.kinds[node] not in ("parameter", "buffer", "tangent")
        if node not in self.free:
            inputs = node.all_input_nodes
            self.free[node] = not is_random(node) and all(map(self._is_free, inputs))
        return self.free[node]

    def outside(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """What a part reads for a value."""
        if node in self.own:
            return self.own[node]
        place = self.placed.slices.get(node)
        if node not in self.placed.head or place is None:
            return new
        built = self._added(PART, (new, *sharded_dim(place), self.parts), node, "a part's own")
        built.meta |= {"head": False, "phase": "backward"}
        self.own[node] = built
        return built

    def _added(self, target: Any, args: tuple, like: fx.Node, reason: str) -> fx.Node:
        built = self.graph.call_function(target, args)
        built.meta = {k: v for k, v in like.meta.items() if k not in ("val", "sizes", "dims")}
        built.meta["made_by"] = f"exact_microbatch: {reason}"
        return built


def sharded_dim(place: Any) -> tuple[int, int]:
    """The dim that a placement shards, and the number of sections before the batch in it."""
    return (place.dim, place.outer) if isinstance(place, Shard) else (place, 1)
