"""A batch that the model's own forward cannot run raises what it raises without graphaccel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import LossFn, split_targets
from graphaccel.errors import CaptureRefused
from graphaccel.proof.untouched import untouched
from graphaccel.runtime.module import own_forward


@contextmanager
def eager_errors(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Iterator[None]:
    """Where a capture in this context is refused for an error of the forward, which it raises on
    this batch in eager mode too, raises that one instead; the model is as before.

    model: whole on this rank.
    """
    try:
        yield
    except CaptureRefused as refused:
        error = _error(model, loss_fn, batch)
        if error is None or type(error) is not type(refused.__cause__):
            raise
        raise error from None


def _error(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Exception | None:
    tensors = (*nn.Module.parameters(model), *batch.tensors.values())
    if any(tensor.is_meta for tensor in tensors):
        return None
    args, kwargs = batch.rebuild(batch.leaves)
    with untouched(model) as guard, torch.enable_grad(), guard:
        try:
            if callable(loss_fn):
                args, kwargs, targets = split_targets(loss_fn, args, kwargs)
                loss_fn(own_forward(model)(*args, **kwargs), *targets)
            else:
                own_forward(model)(*args, **kwargs)
        except Exception as error:  # whatever the script's own code raises
            return error
    return None
