"""Bytes alive at once inside a region, which ONNX Runtime needs besides inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto

from graphaccel.ort.builder import OnnxValue

# The result is a view of the first input.
_VIEWS = {"Reshape", "Identity"}
# The result may reuse the memory of an input of the same size after its last use.
_IN_PLACE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Exp", "Log", "Sqrt", "Tanh", "Sigmoid", "Relu", "Softmax",
    "Not", "And", "Or", "Abs", "Cast", "Where", "ScatterND", "ScatterElements",
}  # fmt: skip


def scratch_bytes(graph: GraphProto, values: Mapping[str, OnnxValue]) -> int:
    """Peak bytes of inner values while the graph runs node by node."""
    outputs = {o.name for o in graph.output}
    outside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    root: dict[str, str] = {}
    for node in graph.node:
        for name in node.output:
            view = node.op_type in _VIEWS
            root[name] = root.get(node.input[0], node.input[0]) if view else name
    # A value that becomes an output is written into the output's own memory.
    outside |= {root[name] for name in outputs}
    last: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in (*node.input, *node.output):
            last[root.get(name, name)] = index
    alive: dict[str, int] = {}
    peak = 0
    for index, node in enumerate(graph.node):
        dying = {
            root.get(n, n)
            for n in node.input
            if last.get(root.get(n, n)) == index and root.get(n, n) in alive
        }
        for name in node.output:
            if not name or root[name] != name or name in outside:
                continue
            size = values[name].nbytes
            if node.op_type in _IN_PLACE:
                taken = next((d for d in sorted(dying) if alive.get(d) == size), None)
                if taken is not None:
                    dying.discard(taken)
                    del alive[taken]
            alive[name] = size
        peak = max(peak, sum(alive.values()))
        for name in dying:
            alive.pop(name, None)
        for name in node.output:
            if name in alive and last.get(name) == index:
                del alive[name]
    return peak
