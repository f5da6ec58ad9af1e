"""The placements of all tensors of a graph on one mesh axis, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from graphaccel.sharding.rules.batch_placement import REPLICATED
from graphaccel.sharding.rules.call_values import Value
from graphaccel.sharding.rules.shard import Placement, Row


@dataclass(frozen=True)
class Placements:
    """The solution.

    rows: strategy of every call that has a choice. held: placements of parameters and buffers, by
    placeholder. versions: the second placement of values that are kept in two. seconds: its cost.
    guessed: calls that were not solved exactly.
    """

    rows: Mapping[fx.Node, Row] = field(repr=False)
    held: Mapping[fx.Node, Placement] = field(repr=False)
    versions: Mapping[Value, Placement] = field(repr=False)
    seconds: float
    guessed: tuple[fx.Node, ...] = ()

    def of(self, value: Value) -> Placement:
        """The placement in which a value is computed."""
        node, position = value
        if node in self.held:
            return self.held[node]
        row = self.rows.get(node)
        return REPLICATED if row is None else row.outputs[position]
