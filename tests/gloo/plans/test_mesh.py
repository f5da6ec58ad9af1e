"""Groups of a mesh with several axes, and graphs bound to a rank of it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.mesh import build_mesh
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


def _sums() -> tuple[dict[str, float], dict[str, int]]:
    plan = Plan(devices=8, data=2, pipeline=2, tensor=2)
    mesh = build_mesh(plan, [(0, 1)], torch.device("cpu"), timedelta(seconds=60))
    mesh.ensure(["tensor", "data+tensor"])
    sums = {}
    for name, group in mesh.groups.items():
        if group is None:
            continue
        total = torch.tensor(float(2**mesh.rank))
        dist.all_reduce(total, group=group)
        sums[name] = total.item()
    return sums, {axis: mesh.coordinate(axis) for axis in ("pipeline", "data", "tensor")}


def test_groups_hold_the_ranks_along_their_axes(pool: Pool) -> None:
    for rank, (sums, at) in enumerate(pool.run(8, _sums)):
        assert (at["pipeline"] * 2 + at["data"]) * 2 + at["tensor"] == rank
        assert sums == {
            "pipeline+data+expert+context+tensor": 255.0,
            "tensor": float(2**rank + 2 ** (rank ^ 1)),
            "data": float(2**rank + 2 ** (rank ^ 2)),
            "pipeline": float(2**rank + 2 ** (rank ^ 4)),
            "data+tensor": 15.0 if rank < 4 else 240.0,
            "pipeline+data": 85.0 if rank % 2 == 0 else 170.0,
        }
