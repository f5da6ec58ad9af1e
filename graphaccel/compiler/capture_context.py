"""What holds while a model is captured, and while a plan for it is chosen."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """A plan says the precision: an autocast around the script's step is not part of a capture."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def no_collections() -> Iterator[None]:
    """Without looking for garbage: graphs are millions of objects that live on, and going through
    all of them again and again as they grow took a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what is there now counts as old: not searched at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()
