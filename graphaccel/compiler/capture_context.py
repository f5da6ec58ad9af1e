"""Autocast is off while a model is captured and planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast: the plan has the precision, and an autocast around the step is not
    captured."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
