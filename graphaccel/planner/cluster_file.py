"""The former path of `planner.cluster.cluster_file`."""

from __future__ import annotations

from typing import Any

from graphaccel.compat.former_paths import moved

_NOW = "graphaccel.planner.cluster.cluster_file"


def __getattr__(name: str) -> Any:
    return moved(__name__, dict.fromkeys(("read_cluster",), _NOW), name)
