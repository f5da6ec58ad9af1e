"""Why pinned placements can not be: the dim, the op that refuses, and where that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from graphaccel.rules.notation import shape_of, tensor_arguments
from graphaccel.rules.shard import Placement, Row, Shard

if TYPE_CHECKING:
    from graphaccel.planner.placements import PlacementProblem


def refusal(problem: PlacementProblem) -> str | None:
    """The first call that no pinned parameter can reach as it is pinned, as a sentence; None where
    each alone could be."""
    for node in problem.held:
        pin = problem.pins.get(problem.kinds[node].name)
        if isinstance(pin, Shard):
            said = _shard_text(problem.kinds[node].name, shape_of(node), pin)
            if not pin.fits(shape_of(node), problem.ranks):
                return f"{said} can not be shared by {problem.axis} {problem.ranks}"
            call = _stuck(problem.rows, node, pin)
            if call is not None:
                where = f" in {call.meta['module']}" if call.meta.get("module") else ""
                shapes = ", ".join(str(list(shape_of(t))) for t in tensor_arguments(call))
                return (
                    f"{said} can not be sharded over {problem.axis} {problem.ranks}: "
                    f"{call.target}{where} has no rule for a part of it (its operands: {shapes})"
                )
    return None


def _shard_text(name: str, shape: Sequence[int], pin: Shard) -> str:
    return f"dim {pin.dim} of {name} {list(shape)}"


def _stuck(
    rows: Mapping[fx.Node, tuple[Row, ...]], node: fx.Node, place: Placement
) -> fx.Node | None:
    """The first call that has no row for a value in this placement. What only looks at it hands
    the placement on."""
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
                found = [_stuck(rows, user, row.outputs[0]) for row in fitting]
                if all(found):
                    return found[0]
    return None
