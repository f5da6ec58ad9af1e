"""Graphs as short text, one line a node, the same in every process.

    %linear: f32[8,16,64] = aten.linear(%x, %p_proj_weight, %p_proj_bias)    # proj

Used for dumps, golden tests, errors and `StepGraph.text()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def graph_text(graph: fx.Graph, *, notes: bool = False) -> str:
    """The whole graph; with `notes`, phase and module path at the end of each line."""
    return "\n".join(_line(node, notes) for node in graph.nodes) + "\n"


def node_text(node: fx.Node) -> str:
    """One node as one line, without notes."""
    return _line(node, False)


def type_text(value: Any) -> str:
    """`f32[8,64]` of a tensor; a parenthesised list of several; the value itself otherwise."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype))}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(v) for v in value) + ")"
    return str(value)


def target_text(target: Any) -> str:
    """`aten.mm` for `aten.mm.default`, `aten.add.Tensor`, `getitem`."""
    plain = getattr(target, "__module__", "") == "_operator"
    name = target.__name__ if plain else str(target)
    return name.removesuffix(".default")


def _line(node: fx.Node, notes: bool) -> str:
    if node.op == "output":
        returned: Any = node.args[0]
        return f"return ({', '.join(_argument(a) for a in returned)})"
    kind = f": {type_text(node.meta['val'])}" if "val" in node.meta else ""
    if node.op in ("placeholder", "get_attr"):
        return f"%{node.name}{kind} = {'input' if node.op == 'placeholder' else 'constant'}"
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{k}={_argument(v)}" for k, v in node.kwargs.items() if v is not None]
    line = f"%{node.name}{kind} = {target_text(node.target)}({', '.join(arguments)})"
    if not notes:
        return line
    said = [node.meta.get("phase", ""), node.meta.get("module", ""), node.meta.get("made_by", "")]
    return f"{line}    # {' '.join(s for s in said if s)}".rstrip(" #")


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_argument(v) for v in value) + "]"
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    return str(value)
