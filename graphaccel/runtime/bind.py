"""Specialises a graph for this rank: device, process groups, mesh coordinates, gloo collectives."""

from __future__ import annotations

from torch import fx

from graphaccel.ir.place import place
from graphaccel.kernels.ops.attention_cuda import attention_on_gpu
from graphaccel.runtime.gloo import for_gloo
from graphaccel.runtime.mesh import Mesh, axes_of


def bind(graph: fx.GraphModule, mesh: Mesh) -> None:
    """Set the group names of collectives, and arguments whose values depend on the rank."""
    changed = False
    if mesh.device.type != "cpu":
        attention_on_gpu()
        changed = place(graph, mesh.device)
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        args = list(node.args)
        axes = args[-1] if args and axes_of(args[-1]) else ""
        if axes:
            args[-1] = mesh.group(axes).group_name
        for position, (axis, multiplier) in node.meta.get("bind", {}).items():
            args[position] = mesh.coordinate(axis) * multiplier
        if args != list(node.args):
            node.args = tuple(args)
            changed = True
        if axes and mesh.device.type == "cpu":
            for_gloo(node, mesh.coordinate(axes))
    if changed:
        graph.recompile()
