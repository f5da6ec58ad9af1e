"""Run a float64 model in float64 throughout, although its code asks for float32 in places.

In half precision such casts help; in float64 they throw away 29 bits, and the comparison of two
computations of the same gradient stops at 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from graphaccel.compiler import captures, compiler
from graphaccel.kernels.check.widened_casts import WidenedCasts
from graphaccel.proof import comparison


@contextmanager
def lift_loss_cast() -> Iterator[None]:
    """Casts to float32 become casts to float64, in eager code and under `torch.export`."""
    with WidenedCasts():
        yield


@contextmanager
def lift_captured_casts() -> Iterator[None]:
    """`lift_loss_cast` only where a compiler or the proof runs a model's own code.

    Its graphs then have no casts to float32, so that planning and passes need no mode, under which
    each read of a tensor's shape is a Python call.
    """
    with ExitStack() as stack:
        for module, name in _RUNS_THE_MODEL:
            lifted = _lifted(getattr(module, name))
            stack.enter_context(patch.object(module, name, lifted))
        yield


_RUNS_THE_MODEL = (
    (captures, "capture"),
    (captures, "observe"),
    (compiler, "tried_choices"),
    (comparison, "run_eager"),
)


def _lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        with lift_loss_cast():
            return function(*args, **kwargs)

    return lifted
