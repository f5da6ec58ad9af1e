"""What calls read, write and start where Inductor compiles them for a GPU.

Elementwise calls, and reductions and norms over the last dim, that feed each other are one kernel:
a value that lives within it is neither written nor read, and a value from outside is read once.
Two such calls are in one kernel if the one reads the other in the same phase, and no matmul (or
another call that is no part of such a kernel) stands between them on any path: the kernel would
wait for itself. This is `torch._inductor.scheduler.Scheduler.fuse_nodes` without its limits on
registers and on the order of loops.

    %c = aten._to_copy(%x, f32)         reads %x                one kernel: reads %x, writes %y
    %m = aten.mul(%c, %c)               nothing
    %s = aten.mean(%m, [-1])            nothing
    %y = aten.mul(%c, %s)               writes %y
    %z = aten.mm(%y, %w)                as without a compiler
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from graphaccel.ir.calls import arguments, is_random
from graphaccel.planner.profile.cost import (
    Resolve,
    first_input,
    is_view,
    node_work,
    read_bytes,
    tensor_bytes,
)
from graphaccel.planner.profile.efficiency import Work
from graphaccel.sharding.rules.ops.pointwise import is_pointwise

aten = torch.ops.aten

_ROWS = frozenset({
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
})  # fmt: skip
_REDUCTIONS = frozenset({
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.var_mean.correction,
    aten.var.correction, aten.argmax.default,
})  # fmt: skip
_MOVES = frozenset({
    aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.embedding.default,
    aten.index.Tensor, aten.gather.default, aten.slice_backward.default, aten.copy.default,
    aten.native_dropout_backward.default, aten.roll.default, aten.flip.default,
    aten._to_copy.default, aten.clone.default, aten.arange.start_step, aten.full.default,
    aten.arange.default, aten.ones.default, aten.scalar_tensor.default, aten.tril.default,
    aten._safe_softmax.default,
})  # fmt: skip
_INDUCTOR = "compiled"


@dataclass(frozen=True)
class Traffic:
    """The part of a kernel that one of its calls accounts for.

    read: which of the call's inputs (`all_input_nodes`) it reads from memory. written: whether its
    result is written. starts: whether it is the call by which the kernel is started.
    """

    read: tuple[int, ...]
    written: bool
    starts: bool


def compiled_traffic(nodes: Iterable[fx.Node]) -> dict[fx.Node, Traffic]:
    """The traffic of each call of the graphs of `nodes` that is part of such a kernel."""
    result: dict[fx.Node, Traffic] = {}
    for graph in dict.fromkeys(node.graph for node in nodes):
        result |= _of_graph(graph)
    return result


def compiled_work(node: fx.Node, traffic: Traffic, sizes: Resolve) -> Work:
    """The work of such a call for a device."""
    inputs = node.all_input_nodes
    read = sum(int(read_bytes(node, inputs[i], sizes)) for i in traffic.read)
    written = int(tensor_bytes(node, sizes)) if traffic.written else 0
    calls = node_work(node, sizes).calls if traffic.starts else 0
    return Work(bytes=read + written, calls=calls, op=_INDUCTOR)


def _of_graph(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    kernels = kernels_of(graph)
    started: set[fx.Node] = set()
    known: set[tuple[fx.Node, fx.Node]] = set()
    result: dict[fx.Node, Traffic] = {}
    for node, kernel in kernels.items():
        read = []
        for i, source in enumerate(node.all_input_nodes):
            root = _viewed(source)
            if kernels.get(root) is kernel or (kernel, root) in known:
                continue
            known.add((kernel, root))
            read.append(i)
        written = any(kernels.get(user) is not kernel for user in _readers(node))
        result[node] = Traffic(tuple(read), written, kernel not in started)
        started.add(kernel)
    return result


def kernels_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Call of a kernel → one call that stands for its kernel, in the order of the graph."""
    parent: dict[fx.Node, fx.Node] = {}
    depth: dict[fx.Node, int] = {}  # most calls outside such kernels on a path to the node

    def kernel(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        sources = [_viewed(n) for n in node.all_input_nodes]
        depth[node] = max(
            (depth[n] + (n.op == "call_function" and n not in parent) for n in sources), default=0
        )
        if not _is_fusible(node):
            continue
        parent[node] = node
        for source in sources:
            near = source in parent and depth[source] == depth[node]
            if near and _is_backward(source) == _is_backward(node):
                parent[kernel(node)] = kernel(source)
    return {node: kernel(node) for node in parent}


def _is_fusible(node: fx.Node) -> bool:
    if node.op != "call_function" or is_view(node) or is_random(node):
        return False
    if node.target in _REDUCTIONS:
        return _last_dim_alone(node)
    return node.target in _ROWS or node.target in _MOVES or is_pointwise(node.target)


def _last_dim_alone(node: fx.Node) -> bool:
    """Whether a reduction is over the last dim: others are kernels of their own."""
    rank = node.all_input_nodes[0].meta["val"].dim()
    dims = arguments(node).get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return [d % rank for d in dims] == [rank - 1] if rank else False


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("phase") == "backward"


def _viewed(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views views; the node itself if it is none."""
    while is_view(node):
        node = first_input(node)
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node, itself or through views; the graph's output is one of them."""
    seen, readers = [node], []
    for value in seen:
        for user in value.users:
            (seen if is_view(user) and first_input(user) is value else readers).append(user)
    return readers
