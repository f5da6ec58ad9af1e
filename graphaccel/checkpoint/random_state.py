"""The states of the random generators of one rank, as plain values."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Of torch (CPU, and this rank's GPU where there is one), Python, and NumPy where it is
    loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (str(kind), keys.tolist(), *rest)
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Continue from states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def valid_random_states(states: Any) -> bool:
    """Whether a run can continue from what a file holds."""
    before = random_states()
    try:
        set_random_states(states)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        set_random_states(before)
    return True
