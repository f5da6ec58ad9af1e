"""Capture a model at another batch or sequence size."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from graphaccel.capture.batch import Batch, resized
from graphaccel.capture.differentiate import differentiate
from graphaccel.capture.export.export import ForwardGraph, LossFn
from graphaccel.capture.forward import forward_graph
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch.export import without_stack_traces


def at_other_size(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    dims: Mapping[int, int],
    size: int,
    answers: Answers,
) -> ForwardGraph | None:
    """The same capture at another size, or None where the model does not allow that size."""
    try:
        with without_stack_traces():  # nodes of the first capture have them
            return forward_graph(model, resized(batch, dims, size), loss_fn, answers)
    except Exception:  # any refusal means that this size is fixed
        return None


def differentiated(
    forward: ForwardGraph, trainable: frozenset[str], scaled: bool, answers: Answers | None
) -> fx.GraphModule | None:
    """The joint graph at another size, or None: some ops check sizes in their backward only."""
    try:
        return differentiate(forward, trainable, scaled=scaled, answers=answers)[0]
    except Exception:  # as in `at_other_size`
        return None
