"""The plan and its pins: the contract between planner, passes and runtime."""

from __future__ import annotations

from typing import Any

from graphaccel.compat.former_paths import moved

_NOW = "graphaccel.planner.plan.plan"


def __getattr__(name: str) -> Any:
    return moved(__name__, dict.fromkeys(("Plan",), _NOW), name)
