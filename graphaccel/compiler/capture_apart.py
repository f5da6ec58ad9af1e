"""Capture with another number of examples where the batch has as many as positions.

Which of two equal sizes of a large mask counts examples can not be computed
(`capture.canonical.causal`), and a capture serves batches of other sizes as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphaccel.capture.batch import (
    LONG,
    Batch,
    batch_leaves,
    batch_size,
    resized,
    sequence_lengths,
)
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import GraphAccelError


def capture_apart(
    capture: Callable[[Batch], StepGraph], batch: Batch, given: Mapping[int, int] | None
) -> StepGraph:
    """The step of `batch`, captured with two examples more where there are as many as positions;
    with its own number where the model takes no other. given: leaf → its batch dim, by the user.

    Raises what `capture` raises."""
    dims = batch_leaves(batch)[1] if given is None else given
    size = batch_size(batch, dims)
    if size >= LONG and size in sequence_lengths(batch, dims):
        try:
            step = capture(resized(batch, dims, size + 2))
        except GraphAccelError:  # its own size may be possible
            return capture(batch)
        if BATCH in step.sizes:
            return step
    return capture(batch)
