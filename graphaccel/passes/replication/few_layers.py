"""Map the nodes at which stages end between a model of all layers and one of few layers.

A cut is a node of the forward graph. A model of few layers has the same nodes under other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.replication.layers import NotRepeated, Run
from graphaccel.ir.replication.unfold import Unfolded, unfolded_from


@dataclass(frozen=True)
class StageEnd:
    """A node after which a stage ends. item: of the pattern of layers; copied: whether layers have
    copies of it. run, layer: the run of layers that contains it, and which layer; None outside."""

    item: int
    copied: bool
    run: Run | None = None
    layer: int = 0


def stage_ends(step: StepGraph, cuts: Sequence[str]) -> tuple[StageEnd, ...]:
    """Where the stages of a step end. Raises NotRepeated where its nodes are already built."""
    assert step.repeats is not None
    if not cuts:
        return ()
    known = _unfolded(step)
    row = {name: i for i, name in enumerate(known.names)}
    results = []
    for name in cuts:
        if name not in row:
            raise NotRepeated(f"the stage ends at {name}, which a pass replaced")
        item, copy = int(known.item[row[name]]), int(known.copy[row[name]])
        middle = int(known.middle[item])
        if middle >= 0:
            results.append(StageEnd(item, True, step.repeats.runs[middle], copy))
            continue
        path = known.path(row[name])
        inside = [(r, n) for r in step.repeats.runs if 0 <= (n := _number(r, path)) < r.count]
        run, layer = inside[0] if inside else (None, 0)
        results.append(StageEnd(item, False, run, layer))
    return tuple(results)


def cut_layers(ends: Sequence[StageEnd]) -> dict[Run, list[int]]:
    """The layers of each run within or after which a stage ends, ascending."""
    results: dict[Run, list[int]] = {}
    for end in ends:
        if end.run is not None:
            results.setdefault(end.run, []).append(end.layer)
    return results


def ends_among(
    ends: Sequence[StageEnd], rows: Sequence[Run], counts: Sequence[int], few: StepGraph
) -> tuple[str, ...]:
    """The names of the nodes in a step that has `counts` layers of each row. Raises NotRepeated."""
    if not ends:
        return ()
    # cached, because the graph drops these names once it is built
    known = few.analyses.cached((), _unfolded, few)
    names = []
    for end in ends:
        copy = 1
        if end.copied:
            assert end.run is not None
            copy = end.layer - sum(
                row.count - count
                for row, count in zip(rows, counts, strict=True)
                if row.path == end.run.path and row.first < end.run.first + end.layer
            )
        names.append(known.names[known.row[known.start[end.item] + copy - 1]])
    return tuple(names)


def _number(run: Run, path: str) -> int:
    number = run.number(path)
    return -1 if number is None else number


def _unfolded(step: StepGraph) -> Unfolded:
    known = unfolded_from(step.forward.graph)
    if known is None:
        raise NotRepeated("the nodes of all layers are made already")
    return known
