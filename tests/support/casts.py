"""Run a float64 model in float64 throughout, although its code asks for float32 in places.

In half precision such casts help; in float64 they throw away 29 bits, and the comparison of two
computations of the same gradient stops at 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphaccel.kernels.check.widened_casts import WidenedCasts


@contextmanager
def lift_loss_cast() -> Iterator[None]:
    """Casts to float32 become casts to float64, in eager code and under `torch.export`."""
    with WidenedCasts():
        yield
