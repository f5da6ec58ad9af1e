"""Switches the garbage collector off where very many objects are created that stay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collection: graphs and imported modules are up to millions of long-lived
    objects, and scanning all of them repeatedly as they grow took a fifth to a third of the time.
    Code that asks `gc.isenabled()` gets what it gets elsewhere."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if gc.isenabled() and not gc.get_freeze_count():
            gc.freeze()  # existing objects count as old: not scanned at once
            gc.unfreeze()


@contextmanager
def importing(module: str) -> Iterator[None]:
    """`no_collections`, where a module is not imported yet."""
    if module in sys.modules:
        yield
        return
    with no_collections():
        yield
