"""The former path of `planner.cluster.catalogue`."""

from __future__ import annotations

from typing import Any

from graphaccel.compat.former_paths import moved

_NOW = "graphaccel.planner.cluster.catalogue"


def __getattr__(name: str) -> Any:
    return moved(__name__, dict.fromkeys(("cluster", "device_names"), _NOW), name)
