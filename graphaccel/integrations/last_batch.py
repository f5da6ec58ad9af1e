"""Asks about the last batch of an epoch at the start of a run, where the length of the loader is
known: a plan that can neither split it nor complete it would end the run there."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import BatchSampler


def check_last_batch(model: nn.Module, loader: Any, left_out_by: str) -> None:
    """Refuse the last batch of an epoch now. Called after a first step under a plan.

    loader: of the whole data set, in batches of the planned size; any other is not asked about.
    left_out_by: the argument that leaves the last batch out.

    Raises BatchNotDivisible (GA206).
    """
    handle = getattr(model, "graphaccel", None)
    if handle is None or handle.steps is None:
        return
    rows = _rows_of_last(loader, handle.plan.batch)
    if rows:
        handle.steps.check_last(rows, left_out_by)


def _rows_of_last(loader: Any, batch: int) -> int:
    """Rows of a last batch that is smaller; 0 for none, or where that is not known."""
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler or sampler.drop_last or sampler.batch_size != batch:
        return 0
    try:
        return len(sampler.sampler) % batch  # pyright: ignore[reportArgumentType]
    except TypeError:  # a sampler without a length
        return 0
