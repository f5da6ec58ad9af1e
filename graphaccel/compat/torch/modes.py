"""Dispatch modes: what sees every operator that runs, also inside the backward; and modes of
functions, which see every call of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack

# Measuring tensor bytes (runtime/meter.py); values computed for real while others are recorded
# (runtime/deferred.py).
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import (
    _disable_current_modes as without_modes,
)

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass", "without_modes"]


class BareDispatchMode(TorchDispatchMode):
    """A mode that compiled code never runs in: torch guards each of its calls against that, which
    takes longer than most of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def changing_modes() -> list[str]:
    """Classes of the modes of functions that are active, in which a forward may compute something
    else. Torch's own choose a device (`torch.device`) and leave values alone; this package's are
    there in captures, too."""
    if not torch._C._len_torch_function_stack():
        return []
    kinds = [type(mode) for mode in _get_current_function_mode_stack()]
    known = ("torch.", "graphaccel.")
    return [kind.__name__ for kind in kinds if not kind.__module__.startswith(known)]


@contextmanager
def outside_modes() -> Iterator[None]:
    """Meanwhile no mode sees what is called, of functions or of ops: for calls that a trace must
    not record."""
    with without_modes(), torch._C.DisableTorchFunction():
        yield
