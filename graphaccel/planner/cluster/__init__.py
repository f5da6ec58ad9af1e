"""Devices, how they are linked, and how long collectives take on them."""

from __future__ import annotations

from typing import Any

from graphaccel.compat.former_paths import moved

_NOW = "graphaccel.planner.cluster.cluster"


def __getattr__(name: str) -> Any:
    return moved(__name__, dict.fromkeys(("Cluster", "Device"), _NOW), name)
