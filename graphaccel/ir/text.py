"""Print graphs as short text, one line a node, identical in every process.

    %linear: f32[8,16,64] = aten.linear(%x, %p_proj_weight, %p_proj_bias)    # proj

Used for dumps, golden tests, errors and `StepGraph.text()`. `ir.parse` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from graphaccel.ir.replication.layers import Item, Place
from graphaccel.ir.replication.unfold import Unfolded, unfolded_from

DTYPES = {
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
"""Names of dtypes in the text; others have their torch name."""

_HOLE = "\0"  # a name to be filled in


def graph_text(graph: fx.Graph, *, notes: bool = False) -> str:
    """The text of a graph; with `notes`, each line ends with phase, module path and the pass that
    created the node."""
    return "\n".join(_line(node, notes) for node in graph.nodes) + "\n"


def module_text(module: fx.GraphModule) -> str:
    """`graph_text` of a module's graph, without building it if it is not built yet."""
    known = unfolded_from(module)
    lines = None if known is None else _unfolded_lines(known)
    return graph_text(module.graph) if lines is None else "\n".join(lines) + "\n"


def _unfolded_lines(known: Unfolded) -> list[str] | None:
    """The lines of a graph that is not built yet. None where an argument hides its nodes."""
    forms = [_form(item) for item in known.pattern.items]
    if any("Place(at=" in form for form in forms):  # in a dict or a slice
        return None
    reader, source = known.slots
    begin = np.searchsorted(reader, np.arange(len(known.item) + 1)).tolist()
    names, sources = known.names, source.tolist()
    collected = []
    for row, item in enumerate(known.item.tolist()):
        read = [names[s] for s in sources[begin[row] : begin[row + 1]]]
        collected.append(forms[item] % (*names[row : row + 1], *read))
    calls, results = collected[: known.nodes], collected[known.nodes :]
    return [*calls, f"return ({', '.join(results)})"]


def _form(item: Item) -> str:
    """The line of an item, or the text of a result, as a template for its name and sources."""
    args, kwargs = item.call
    node = item.node
    said = _argument(args[0]) if node is None else _call_text(node, _HOLE, args, kwargs)
    return said.replace("%", "%%").replace(_HOLE, "%s")


def node_text(node: fx.Node) -> str:
    """One node as one line, without notes."""
    return _line(node, False)


def type_text(value: Any) -> str:
    """`f32[8,64]` for a tensor; a parenthesised list for several; the value itself otherwise."""
    if isinstance(value, torch.Tensor):
        return f"{DTYPES.get(value.dtype, str(value.dtype))}[{','.join(map(str, value.shape))}]"
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
    line = _call_text(node, node.name, node.args, node.kwargs)
    if not notes or node.op in ("placeholder", "get_attr"):
        return line
    built_by = node.meta.get("made_by", "")
    said = [node.meta.get("phase", ""), node.meta.get("module", ""), built_by and f"by {built_by}"]
    return f"{line}    # {' '.join(s for s in said if s)}".rstrip(" #")


def _call_text(node: fx.Node, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    kind = f": {type_text(node.meta['val'])}" if "val" in node.meta else ""
    if node.op in ("placeholder", "get_attr"):
        return f"%{name}{kind} = {'input' if node.op == 'placeholder' else 'constant'}"
    arguments = [_argument(a) for a in args]
    arguments += [f"{k}={_argument(v)}" for k, v in kwargs.items() if v is not None]
    return f"%{name}{kind} = {target_text(node.target)}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, Place):
        return f"%{_HOLE}"
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_argument(v) for v in value) + "]"
    if isinstance(value, torch.dtype):
        return DTYPES.get(value, str(value))
    return str(value)
