"""Explain why pinned placements are impossible: the dim, the op that refuses, and its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from graphaccel.sharding.rules.notation import shape_of, tensor_arguments
from graphaccel.sharding.rules.shard import Placement, Row, Shard
from graphaccel.sharding.solve.shardable import Shardable


def refusal(space: Shardable) -> str | None:
    """A sentence about the first call that has no strategy for a pinned parameter; None where each
    pin alone is possible."""
    for node in space.held:
        pin = space.pins.get(space.kinds[node].name)
        if isinstance(pin, Shard):
            said = _shard_text(space.kinds[node].name, shape_of(node), pin)
            if not pin.fits(shape_of(node), space.ranks):
                return f"{said} can not be shared by {space.axis} {space.ranks}"
            call = _stuck(space.rows, node, pin)
            if call is not None:
                where = f" in {call.meta['module']}" if call.meta.get("module") else ""
                shapes = ", ".join(str(list(shape_of(t))) for t in tensor_arguments(call))
                return (
                    f"{said} can not be sharded over {space.axis} {space.ranks}: "
                    f"{call.target}{where} has no rule for a part of it (its operands: {shapes})"
                )
    return None


def _shard_text(name: str, shape: Sequence[int], pin: Shard) -> str:
    return f"dim {pin.dim} of {name} {list(shape)}"


def _stuck(
    rows: Mapping[fx.Node, tuple[Row, ...]], node: fx.Node, place: Placement
) -> fx.Node | None:
    """The first call that has no strategy for a value in this placement, looking through views and
    casts."""
    for user in node.users:
        if user not in rows:
            continue
        for at, tensor in enumerate(tensor_arguments(user)):
            if tensor is not node:
                continue
            fitting = [row for row in rows[user] if row.inputs[at] in (place, None)]
            if not fitting:
                return user
            if len(user.all_input_nodes) == 1:
                results = [_stuck(rows, user, row.outputs[0]) for row in fitting]
                if all(results):
                    return results[0]
    return None
