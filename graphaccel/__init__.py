"""graphaccel: one line that captures, plans, rewrites and runs an unchanged PyTorch model.

    import graphaccel
    model, optimizer = graphaccel.optimize(model, optimizer, devices=8)

Importing this package does not import torch; the first use of a public function does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphaccel import errors
from graphaccel.errors import GraphAccelError
from graphaccel.garbage import importing

if TYPE_CHECKING:
    from graphaccel.api import (
        fewest_devices,
        fits,
        full_state_dict,
        largest_batch,
        optimize,
        plan,
    )
    from graphaccel.checkpoint.export import export
    from graphaccel.checkpoint.load import load
    from graphaccel.checkpoint.save import save
    from graphaccel.kernels.fusion import Scalar, T, fusion
    from graphaccel.planner.plan.module_pins import replicate, shard
    from graphaccel.runtime.deferred import deferred
    from graphaccel.sharding.rules.custom import sharding_rule

__version__ = "0.1.0"

_PUBLIC = {
    "Scalar": "graphaccel.kernels.fusion",
    "T": "graphaccel.kernels.fusion",
    "deferred": "graphaccel.runtime.deferred",
    "export": "graphaccel.checkpoint.export",
    "fewest_devices": "graphaccel.api",
    "fits": "graphaccel.api",
    "full_state_dict": "graphaccel.api",
    "fusion": "graphaccel.kernels.fusion",
    "largest_batch": "graphaccel.api",
    "load": "graphaccel.checkpoint.load",
    "optimize": "graphaccel.api",
    "plan": "graphaccel.api",
    "replicate": "graphaccel.planner.plan.module_pins",
    "save": "graphaccel.checkpoint.save",
    "shard": "graphaccel.planner.plan.module_pins",
    "sharding_rule": "graphaccel.sharding.rules.custom",
}
__all__ = [
    "GraphAccelError", "Scalar", "T", "__version__", "deferred", "errors", "export",
    "fewest_devices", "fits", "full_state_dict", "fusion", "largest_batch", "load", "optimize",
    "plan", "replicate", "save", "shard", "sharding_rule",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public function, and torch with it, when it is first used."""
    if name in _PUBLIC:
        with importing(_PUBLIC[name]):
            module = importlib.import_module(_PUBLIC[name])
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
