"""Context managers that are active while a model is captured and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast: the plan has the precision, and an autocast around the step is not
    captured."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collection: graphs are millions of long-lived objects, and scanning all of
    them repeatedly as they grow took a third of the time. A forward that asks `gc.isenabled()`
    gets what it gets in a step."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if gc.isenabled():
            if not gc.get_freeze_count():  # existing objects count as old: not scanned at once
                gc.freeze()
                gc.unfreeze()
