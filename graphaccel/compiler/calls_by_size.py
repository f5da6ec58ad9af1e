"""Whether a forward calls at other sizes of a batch what a captured step has for them.

A step that is captured at two sizes has sizes as expressions, and of a branch on a size
(`if len(x) > 16:`) the side that both take. Operators and the numbers among their arguments are
compared, in a forward without data. So are numbers, sizes and texts that the forward returns beside
tensors (`{"loss": loss, "rows": len(x)}`): they are those of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from graphaccel.capture.batch import Batch
from graphaccel.capture.points import points
from graphaccel.capture.state.observe import Calls
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import SEQUENCES, evaluate, fit, is_fitted
from graphaccel.ir.replication.unfold import input_nodes

_Sizes = Mapping[sympy.Symbol, int]


class CallsBySize:
    """Compares the operators of a forward with those at the capture of a step.

    called: (batch, training) → the operators, None where the forward does not run without data.
    """

    def __init__(self, called: Callable[[Batch, bool], Calls | None]) -> None:
        self._called = called
        self._at_capture: dict[int, tuple[Hashable, Calls | None]] = {}
        self._same: dict[Hashable, bool] = {}
        self._now: dict[Hashable, Calls | None] = {}
        self._known: dict[Hashable, Calls | None] = {}

    def note(self, step: StepGraph, batch: Batch, calls: Calls | None) -> None:
        """A step was captured of this batch, and these are the operators of the forward."""
        if step.sizes:
            self._at_capture[id(step)] = batch.signature(), calls

    def hold(self, step: StepGraph, batch: Batch, numbers: tuple[float, ...]) -> bool:
        """Whether a step serves this batch, in the Python state of its capture. numbers: of the
        model, that are the step's inputs now."""
        signature, calls = self._at_capture.get(id(step), (None, None))
        if calls is None or signature == batch.signature():
            return True
        key = (id(step), batch.signature())
        if key not in self._same:
            now = self._of(step, batch)
            self._same[key] = now is None or (
                now.names == calls.names
                and (_returns(step, now) or same_plain(now.plain, calls.plain))
                and self._follow(step, batch, numbers, now)
            )
        return self._same[key]

    def returned(self, step: StepGraph, batch: Batch) -> Mapping[int, Any]:
        """What the forward of a step returns of a batch besides tensors: leaf → value."""
        own = step.forward.returned.plain
        signature, calls = self._at_capture.get(id(step), (None, None))
        if not own or calls is None:
            return own
        now = calls if signature == batch.signature() else self._of(step, batch)
        return now.plain if now is not None and now.plain and _returns(step, now) else own

    def _of(self, step: StepGraph, batch: Batch) -> Calls | None:
        """The operators for a batch of another signature than the step's."""
        key = (id(step), batch.signature())
        if key not in self._now:
            self._now[key] = self._called(batch, step.training)
        return self._now[key]

    def _follow(
        self, step: StepGraph, batch: Batch, numbers: tuple[float, ...], now: Calls
    ) -> bool:
        """Whether numbers among the arguments are those that the step has for these sizes."""
        sizes = step.sizes_of(batch)
        base = self._at(step, batch, step.sizes, numbers)
        if base is None or base.names != now.names:
            return base is None
        own = _points(step, batch)
        known: list[tuple[sympy.Symbol, int]] = []
        others: list[Calls] = []
        for symbol, size in step.sizes.items():
            if sizes[symbol] == size:
                continue
            # Through the capture's own sizes first: the step's expressions pass through those.
            for other in (*own.get(symbol, ()), *_others(size, sizes[symbol])):
                calls = self._at(step, batch, {**step.sizes, symbol: other}, numbers)
                if calls is not None and calls.names == now.names:
                    known.append((symbol, other))
                    others.append(calls)
                    break
            else:
                return True  # the model takes no further size: nothing tells
        rows = zip(base.numbers, now.numbers, *(one.numbers for one in others), strict=False)
        return all(
            is_fitted(value, various, step.sizes, known)
            and math.isclose(
                evaluate(fit(value, various, step.sizes, known), sizes), wanted, rel_tol=1e-9
            )
            for value, wanted, *various in rows
            if not (math.isnan(value) and math.isnan(wanted))
        )

    def _at(
        self, step: StepGraph, batch: Batch, sizes: _Sizes, numbers: tuple[float, ...]
    ) -> Calls | None:
        """The operators for a batch with other sizes."""
        key = (id(step), tuple(sizes.values()), numbers)
        if key not in self._known:
            self._known[key] = self._called(resized_to(step, batch, sizes), step.training)
        return self._known[key]


def _returns(step: StepGraph, calls: Calls) -> bool:
    """Whether a forward returns as many values as the step: one of fewer layers may have fewer."""
    return calls.leaves == step.forward.returned.num_leaves


def same_plain(one: Mapping[int, Any] | None, other: Mapping[int, Any] | None) -> bool:
    """Whether a forward returns the same besides tensors, as far as both are known; NaN is NaN."""
    return one is None or other is None or repr(one) == repr(other)


def _points(step: StepGraph, batch: Batch) -> dict[sympy.Symbol, tuple[int]]:
    """The size at which a step was captured as well, of each symbol."""
    lengths = sum(symbol in step.sizes for symbol in SEQUENCES) or 1
    built = resized_to(step, batch, step.sizes)
    return {p.symbol: (p.other,) for p in points(built, step.batch_dims, lengths)}


def _others(size: int, now: int) -> Iterator[int]:
    """Further sizes to run at: multiples of the size first, so that parts of it stay whole."""
    yield from (n for n in (2 * size, 3 * size, size // 2) if n not in (size, now) and n > 1)


def resized_to(step: StepGraph, batch: Batch, sizes: _Sizes) -> Batch:
    """A batch of a step with these sizes, without values."""
    leaves = list(batch.leaves)
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        if spec.kind == "batch" and isinstance(leaf := leaves[spec.leaf], torch.Tensor):
            shape = [int(evaluate(dim, sizes)) for dim in node.meta["dims"]]
            leaves[spec.leaf] = leaf.new_empty(shape, requires_grad=leaf.requires_grad)
    return replace(batch, leaves=tuple(leaves))
