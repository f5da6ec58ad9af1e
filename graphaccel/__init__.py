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

if TYPE_CHECKING:
    from graphaccel.api import full_state_dict, optimize, plan

__version__ = "0.1.0"

__all__ = ["GraphAccelError", "__version__", "errors", "full_state_dict", "optimize", "plan"]


def __getattr__(name: str) -> Any:
    """Public functions, imported from `graphaccel.api` (and with it torch) when first used."""
    if name in ("full_state_dict", "optimize", "plan"):
        return getattr(importlib.import_module("graphaccel.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
