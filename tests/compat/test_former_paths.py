"""Public names are found under the paths that they had before, with a warning."""

from __future__ import annotations

import importlib
import re

import pytest

NAMES = [
    ("graphaccel.planner.catalogue", "device_names", "graphaccel.planner.cluster.catalogue"),
    ("graphaccel.planner.catalogue", "cluster", "graphaccel.planner.cluster.catalogue"),
    ("graphaccel.planner.cluster_file", "read_cluster", "graphaccel.planner.cluster.cluster_file"),
    ("graphaccel.planner.plan", "Plan", "graphaccel.planner.plan.plan"),
    ("graphaccel.planner.cluster", "Cluster", "graphaccel.planner.cluster.cluster"),
    ("graphaccel.planner.cluster", "Device", "graphaccel.planner.cluster.cluster"),
]


@pytest.mark.parametrize(("before", "name", "now"), NAMES)
def test_the_former_path_gives_the_same_object(before: str, name: str, now: str) -> None:
    text = f"{before}.{name} is {now}.{name} now; the former path goes in the next version"
    with pytest.warns(DeprecationWarning, match=re.escape(text)) as caught:
        former = getattr(importlib.import_module(before), name)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert former is getattr(importlib.import_module(now), name)


@pytest.mark.parametrize("module", sorted({before for before, _, _ in NAMES}))
def test_what_was_not_public_is_not_there(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nothing'"):
        _ = importlib.import_module(module).Nothing
