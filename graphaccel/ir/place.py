"""Move a graph to another device, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import FakeTensor


def place(graph: fx.GraphModule, device: torch.device) -> bool:
    """Set the device of every value, of device arguments and of the constants that the graph holds.
    Returns whether an argument changed: the module's code is then out of date."""

    def placed(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    changed = False
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(
                FakeTensor, lambda t: _moved(t, device), node.meta["val"]
            )
        if node.op == "get_attr":
            _move_attribute(graph, str(node.target), device)
        if node.op == "call_function":
            args, kwargs = map_aggregate(node.args, placed), map_aggregate(node.kwargs, placed)
            if (args, kwargs) != (node.args, node.kwargs):
                node.args, node.kwargs, changed = args, kwargs, True
    return changed


def _moved(value: Any, device: torch.device) -> Tensor:
    if value.device == device:
        return value
    with value.fake_mode:
        built = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return built.requires_grad_(value.requires_grad)


def _move_attribute(graph: fx.GraphModule, name: str, device: torch.device) -> None:
    *path, last = name.split(".")
    owner: Any = graph
    for part in path:
        owner = getattr(owner, part)
    value = getattr(owner, last)
    if isinstance(value, Tensor) and value.device != device:
        setattr(owner, last, value.to(device))
