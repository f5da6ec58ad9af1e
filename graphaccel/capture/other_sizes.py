"""Capture a model at another batch or sequence size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import sympy
from torch import fx, nn

from graphaccel.capture.batch import Batch, resized
from graphaccel.capture.differentiate import differentiate
from graphaccel.capture.export.export import ForwardGraph, LossFn
from graphaccel.capture.forward import forward_graph
from graphaccel.capture.points import Point, points
from graphaccel.capture.symbols import SEQUENCES, same_structure, spacing, tells
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch.export import without_stack_traces

_Change = tuple[Mapping[int, int], int]
"""Dims of leaves, and their size."""


def at_points(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    dims: Mapping[int, int],
    answers: Answers,
    forward: ForwardGraph,
    lengths: int,
) -> list[tuple[Point, ForwardGraph]]:
    """The captures that tell how a step depends on the sizes of its batch. forward: that of the
    batch itself. lengths: how many may vary. A size of which the model takes one value alone has
    none."""
    others: list[tuple[Point, ForwardGraph]] = []
    changes: dict[sympy.Symbol, _Change] = {}
    for point in points(batch, dims, lengths):
        for where in point.places:
            change = where, point.other
            variant = _at_other_size(model, batch, loss_fn, [change], answers)
            ratio = point.other / point.size
            if variant is None or not same_structure(forward.graph, variant.graph, ratio):
                continue
            far = spacing(forward.graph, variant.graph, point.size, point.other)
            size = next(n for n in count(point.other + far, far or 1) if n != point.size)
            there = far and _at_other_size(model, batch, loss_fn, [(where, size)], answers)
            if not far or (there and _tells(forward, point, variant, there, size)):
                others.append((point, variant))
                changes[point.symbol] = change
                break
    if changes.keys() >= {*SEQUENCES}:
        several = [(p.symbol, p.size, p.other, g.graph) for p, g in others if p.symbol in SEQUENCES]
        base = {symbol: size for symbol, size, _, _ in several}
        at = {point.symbol: point.other for point, _ in others if point.symbol in base}
        both = _at_other_size(model, batch, loss_fn, [changes[s] for s in SEQUENCES], answers)
        captures = [(symbol, other, graph) for symbol, _, other, graph in several]
        if both is None or not tells(forward.graph, base, captures, both.graph, at):
            return [one for one in others if one[0].symbol not in SEQUENCES]
    return others


def _tells(
    forward: ForwardGraph, point: Point, other: ForwardGraph, there: ForwardGraph, size: int
) -> bool:
    """Whether two captures tell a third one, with `size`."""
    symbol = point.symbol
    known = [(symbol, point.other, other.graph)]
    return tells(forward.graph, {symbol: point.size}, known, there.graph, {symbol: size})


def _at_other_size(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    changes: Sequence[_Change],
    answers: Answers,
) -> ForwardGraph | None:
    """The same capture with other sizes of some dims, or None where the model does not allow
    them."""
    try:
        for dims, size in changes:
            batch = resized(batch, dims, size)
        with without_stack_traces():  # nodes of the first capture have them
            return forward_graph(model, batch, loss_fn, answers)
    except Exception:  # any refusal means that this size is fixed
        return None


def differentiated(
    forward: ForwardGraph, trainable: frozenset[str], scaled: bool, answers: Answers | None
) -> fx.GraphModule | None:
    """The joint graph at another size, or None: some ops check sizes in their backward only."""
    try:
        return differentiate(forward, trainable, scaled=scaled, answers=answers)[0]
    except Exception:  # as in `_at_other_size`
        return None
