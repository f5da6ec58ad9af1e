"""Check placements that were not solved here: every strategy is legal, every conversion exists."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from torch import fx

from graphaccel.capture.export.export import GraphInput
from graphaccel.sharding.placement_names import Name, NotPlaced, names_of
from graphaccel.sharding.placement_text import call_text, placement_text
from graphaccel.sharding.rules.call_values import source_of
from graphaccel.sharding.rules.notation import tensor_arguments
from graphaccel.sharding.rules.shard import Row
from graphaccel.sharding.rules.solution import Placements
from graphaccel.sharding.solve.placements import PlacementProblem

_SHOWN = 6


def checked(
    problem: PlacementProblem,
    placements: Placements,
    inputs: Sequence[GraphInput],
    stated: Collection[Name],
) -> Placements:
    """The placements, with the costs of their strategies. stated: all names that have a placement.

    Raises NotPlaced for a name that the graph does not have, ValueError for a placement that is not
    among those that the solver chooses from: with it the graph would compute something else.
    """
    space = problem.space
    names = names_of(space.graph, inputs)
    if unknown := sorted(set(stated) - {names[n] for n in (*space.held, *space.calls)}):
        raise NotPlaced(f"there is no {unknown[0]}")
    for node, place in placements.held.items():
        allowed = space.stored_placements(node)
        if place not in allowed:
            known = "  ".join(map(placement_text, allowed))
            raise ValueError(
                f"{names[node]} can not be {placement_text(place)}; it can be: {known}"
            )
    rows = {}
    for node, row in placements.rows.items():
        rows[node] = _legal(row, space.rows[node], names[node])
    result = Placements(rows, placements.held, placements.versions, 0.0)
    for value, place in placements.versions.items():
        if place not in problem.second_places(value):
            said = placement_text(place)
            raise ValueError(f"{names[value[0]]} can not keep result {value[1]} {said}")
        if problem.conversion(value, result.of(value), place) == inf:
            raise ValueError(f"{names[value[0]]} can not be kept {placement_text(place)}")
    for node in space.calls:
        _check_reads(problem, result, node, names)
    _check_results(problem, result, names)
    return result


def _legal(row: Row, allowed: Sequence[Row], name: Name) -> Row:
    """The legal strategy that says the same as `row`. Raises ValueError where there is none."""
    for known in allowed:
        if (known.inputs, known.outputs, known.lowering) == (row.inputs, row.outputs, row.lowering):
            return known
    known_texts = [f"  {call_text(known, {})}" for known in allowed[:_SHOWN]]
    more = f", and {len(allowed) - _SHOWN} more" if len(allowed) > _SHOWN else ""
    raise ValueError(
        f"{name} can not be {call_text(row, {})}; it can be{more}:\n" + "\n".join(known_texts)
    )


def _check_reads(
    problem: PlacementProblem, placements: Placements, node: fx.Node, names: dict[fx.Node, Name]
) -> None:
    """Raises ValueError where a call reads a placement that a value can not be converted to."""
    for tensor, need in zip(tensor_arguments(node), placements.rows[node].inputs, strict=True):
        value = source_of(tensor)
        if not problem.readable(value, placements, need):
            given = placement_text(placements.of(value))
            source = names.get(value[0], value[0].name)
            raise ValueError(
                f"{names[node]} reads {source} as {placement_text(need)}, which it is not and can "
                f"not be converted to: it is {given}"
            )


def _check_results(
    problem: PlacementProblem, placements: Placements, names: dict[fx.Node, Name]
) -> None:
    """Raises ValueError where a result can not be converted to the placement that it needs."""
    for value, need, what in problem.results(placements):
        if not problem.readable(value, placements, need):
            given = placement_text(placements.of(value))
            source = names.get(value[0], value[0].name)
            raise ValueError(f"{what} is {source}, which is {given} and can not be converted to "
                             f"{placement_text(need)}")  # fmt: skip
