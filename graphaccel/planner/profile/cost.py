"""The cost of one node of a step: FLOPs, bytes, seconds.

FLOPs are those of `torch.utils.flop_counter` (multiply and add count as two; only matmuls,
convolutions, attention and fused ops that declare FLOPs count). Bytes are the distinct tensors a
node reads and writes; views are free. Sizes are the expressions that capture stored in
`meta["dims"]`, so that a count is an expression in `b` (batch) and `s` (sequence), or a number once
sizes are given. `planner.profile.efficiency` converts them to seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from graphaccel.capture.symbols import evaluate
from graphaccel.compat.torch.onednn import onednn_linear
from graphaccel.ir.calls import COUNTED_LIKE, counted_packet, is_causal, op_packet
from graphaccel.ir.values import operands
from graphaccel.kernels.ops.experts import GRADIENT as EXPERT_GRADIENT
from graphaccel.kernels.ops.experts import GROUPED_MATMUL
from graphaccel.kernels.register import fusion_of, is_backward
from graphaccel.kernels.spec import Chunks, Fusion
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.efficiency import NOTHING, Work, seconds_of

Amount: TypeAlias = Any  # int | sympy.Expr
Dims: TypeAlias = tuple[Amount, ...]
aten = torch.ops.aten

_VIEWS = {
    aten._unsafe_view.default,
    aten.reshape.default,
    torch.ops._c10d_functional.wait_tensor.default,  # it returns the tensor that it waited for
    getitem,
}
# Views that can be inverted: a matmul before them can write directly to where its result is needed.
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
_SUMS = {aten.addmm_.default, aten.mm.out}
OPTIMIZER = "optimizer"
_MATMULS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# Reads of the first argument that touch only as much as the result holds.
_GATHERS = {aten.embedding, aten.index_select, aten.index, aten.gather}


class Sizes:
    """Sizes of the symbols, and the values of expressions in them."""

    def __init__(self, sizes: Mapping[sympy.Symbol, int]) -> None:
        self._sizes = dict(sizes)
        self._known: dict[Any, int] = {}
        self._dims: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """`dims_of` a node, cached."""
        if node not in self._dims:
            self._dims[node] = _resolved(node.meta.get("dims", ()), self)
        return self._dims[node]

    def __call__(self, expression: Amount) -> int:
        """The value of an expression, rounded up."""
        if isinstance(expression, int):
            return expression
        if expression not in self._known:
            self._known[expression] = math.ceil(evaluate(expression, self._sizes))
        return self._known[expression]


class _Actual(Sizes):
    """The sizes that the values of a program have. What a pass inserted has no expressions, and
    those of the step count examples of the batch."""

    def __init__(self) -> None:
        super().__init__({})

    def of(self, node: fx.Node) -> Any:
        """The shape of a node's result, or of each of several."""
        return _shapes(node.meta.get("val"))


def _symbolic(expression: Amount) -> Amount:
    return expression


Resolve: TypeAlias = Callable[[Amount], Amount]


def first_input(node: fx.Node) -> fx.Node:
    """The first node a node reads: what a view is a view of."""
    return node.all_input_nodes[0]


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument's storage (or of one item of several)."""
    if node.op != "call_function":
        return False
    return node.target in _VIEWS or bool(getattr(node.target, "is_view", False))


def dims_of(node: fx.Node, resolve: Resolve = _symbolic) -> Any:
    """Sizes of a node's result: a tuple, or a tuple of tuples for several results."""
    if isinstance(resolve, Sizes):
        return resolve.of(node)
    return _resolved(node.meta.get("dims", ()), resolve)


def _resolved(dims: Any, resolve: Resolve) -> Any:
    if isinstance(dims, tuple):
        return tuple([_resolved(d, resolve) for d in dims])
    return resolve(dims)


def node_flops(node: fx.Node, resolve: Resolve = _symbolic) -> Amount:
    """FLOPs of a node: 0 for anything but matmuls, convolutions, attention and fused ops."""
    if node.op != "call_function":
        return 0
    formula = flop_registry.get(counted_packet(node))
    if formula is None:
        return _fused_flops(node, resolve)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: dims_of(n, resolve))
    return formula(*args, **kwargs, out_val=dims_of(node, resolve))


def _fused_flops(node: fx.Node, resolve: Resolve) -> Amount:
    """FLOPs that a fused op declares; they are assumed to include those of its backward."""
    fusion = fusion_of(node.target)
    if fusion is None or fusion.flops is None or is_backward(node.target):
        return 0
    return fusion.flops(**_given(fusion, node, resolve))


def _given(fusion: Fusion, node: fx.Node, resolve: Resolve, on: str = "") -> dict[str, Any]:
    """Inputs of a fused op by name; for tensors, the attributes that formulas may use. on: device
    type, where it is not that of the tensors."""

    def shaped(value: fx.Node) -> _Shaped:
        like = value.meta["val"]
        return _Shaped(dims_of(value, resolve), like.dtype, torch.device(on or like.device))

    given = [shaped(value) if isinstance(value, fx.Node) else value for value in node.args]
    return dict(zip(fusion.inputs, given, strict=False))


def in_chunks(node: fx.Node) -> bool:
    """Whether a node is a fused op that processes its rows in chunks."""
    fusion = fusion_of(node.target)
    return fusion is not None and fusion.chunks is not None and not is_backward(node.target)


def chunks_of(node: fx.Node, sizes: Resolve, chunk: int = 0, on: str = "") -> Chunks:
    """How such a node processes its chunks. chunk: rows at a time, instead of the node's own
    argument. on: device type, where it is not that of the tensors."""
    fusion = fusion_of(node.target)
    assert fusion is not None
    assert fusion.chunks is not None
    given = _given(fusion, node, sizes, on)
    return fusion.chunks(**given | ({"chunk": chunk} if chunk else {}))


def chunk_bytes(node: fx.Node, sizes: Resolve, chunk: int = 0) -> int:
    """Bytes that the node takes at its peak besides its results."""
    fusion = fusion_of(node.target)
    if fusion is None or fusion.workspace is None:
        return 0
    given = _given(fusion, node, sizes)
    return int(fusion.workspace(**given | ({"chunk": chunk} if chunk else {})))


class _Shaped:
    """Sizes of a tensor, its dtype and device, for formulas that read them from a tensor."""

    def __init__(self, dims: Dims, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = dims, dtype, device

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> Amount:
        """Number of elements."""
        return math.prod(self.shape)


def item_bytes(value: Any) -> int:
    """Bytes of one element of a tensor, fake or not."""
    return value.element_size() if isinstance(value, torch.Tensor) else 0


def _tensors(value: Any, dims: Any) -> list[tuple[Any, Dims]]:
    if isinstance(value, torch.Tensor):
        return [(value, dims)]
    if isinstance(value, (tuple, list)):
        return [t for v, d in zip(value, dims, strict=False) for t in _tensors(v, d)]
    return []


def tensor_bytes(node: fx.Node, resolve: Resolve = _symbolic) -> Amount:
    """Bytes of all tensors of a node's result."""
    total: Amount = 0
    for value, dims in _tensors(node.meta.get("val"), dims_of(node, resolve)):
        total = total + math.prod(dims) * item_bytes(value)
    return total


def node_bytes(node: fx.Node, resolve: Resolve = _symbolic) -> Amount:
    """Bytes a node reads and writes. A repeated input counts once; a gather reads as much as its
    result holds.

    A broadcast view counts the bytes of its base, when sizes are numbers.
    """
    if node.op != "call_function" or is_view(node):
        return 0
    written = tensor_bytes(node, resolve)
    sources = dict.fromkeys(node.all_input_nodes)
    return written + sum(read_bytes(node, source, resolve) for source in sources)


def read_bytes(node: fx.Node, source: fx.Node, resolve: Resolve = _symbolic) -> Amount:
    """Bytes that a node reads of one of its inputs (`node_bytes`)."""
    if op_packet(node) in _GATHERS:
        gathers = {operands(node)[0]: tensor_bytes(node, resolve)}
    else:
        gathers = _gathered(node, resolve)
    if source in gathers:
        return gathers[source]
    read = tensor_bytes(source, resolve)
    if resolve is not _symbolic and source.target in (aten.expand.default,):
        return min(read, tensor_bytes(first_input(source), resolve))
    return read


def _gathered(node: fx.Node, resolve: Resolve) -> dict[Any, Amount]:
    """Bytes that a fused op reads of the inputs in which it looks up rows."""
    fusion = fusion_of(node.target)
    if fusion is None or not fusion.gathered:
        return {}
    if is_backward(node.target):
        names, rows = fusion.read_back, 0
    else:
        value, dims = _tensors(node.meta["val"], dims_of(node, resolve))[0]
        names, rows = tuple(fusion.inputs), math.prod(dims) * item_bytes(value)
    return {a: rows for n, a in zip(names, node.args, strict=True) if n in fusion.gathered}


def node_work(node: fx.Node, sizes: Resolve, chunk: int = 0, on: str = "") -> Work:
    """The work of a node for a device; `sizes` gives numbers for expressions (`Sizes`). chunk, on:
    see `chunks_of`.

    Causal attention counts half of the FLOPs.
    """
    if node.op != "call_function" or is_view(node):
        return NOTHING
    op = str(op_packet(node))
    if in_chunks(node):
        return replace(_chunked(node, sizes, chunk, on), op=op)
    return _asked(node, sizes, op)


def program_work(node: fx.Node) -> Work | None:
    """The work of a call in a stage's program, whose values have sizes; None for views and calls
    that move nothing. Matmuls that add to their result, or write it elsewhere, count as matmuls."""
    if node.op != "call_function" or is_view(node):
        return None
    sizes = _Actual()
    linear = node.target is onednn_linear()
    if linear or node.target in _SUMS:
        given: Any = node.args[:2] if linear else node.args[-2:]
        left, right = map(sizes.of, given)
        columns, inner = right if linear else right[::-1]
        rows = math.prod(left[:-1])
        flops, moved = 2 * rows * columns * inner, int(node_bytes(node, sizes))
        dtype = str(given[0].meta["val"].dtype).removeprefix("torch.")
        return Work("product", flops, moved, dtype, rows, columns, inner)
    return node_work(node, sizes)


def _shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v) for v in value)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _asked(node: fx.Node, sizes: Resolve, op: str) -> Work:
    moved = int(node_bytes(node, sizes))
    flops = int(node_flops(node, sizes))
    if not flops:
        return Work(bytes=moved, op=op)
    # A fused op sums a loss in float32, and multiplies in the dtype of its input.
    source = first_input(node) if fusion_of(node.target) is not None else node
    value = _tensors(source.meta["val"], dims_of(source, sizes))[0][0]
    dtype = str(value.dtype).removeprefix("torch.")
    packet = op_packet(node)
    if packet in COUNTED_LIKE or "scaled_dot_product" in str(packet):
        return replace(_attention(node, sizes, flops, moved, dtype), op=op)
    given = [dims_of(n, sizes) for n in node.args if isinstance(n, fx.Node)]
    if packet in _MATMULS:
        left, right = given[-2:]
        rows, inner, columns = left[-2], left[-1], right[-1]
        count = left[0] if len(left) == 3 else 1
        matrices = [n for n in node.args if isinstance(n, fx.Node)][-2:]
        aligned = min(_aligned(n, sizes) for n in (node, *matrices))
        shape = rows, columns, inner, count
        cast = 1 / left_readers(node)
        return Work("product", flops, moved, dtype, *shape, 1, op, aligned, cast=cast)
    if node.target in (GROUPED_MATMUL, EXPERT_GRADIENT):
        cast = 1 / left_readers(node)
        return Work("product", flops, moved, dtype, *_grouped(node, sizes), op=op, cast=cast)
    if fusion_of(node.target) is not None and len(given) > 1 and len(given[1]) == 2:
        columns, inner = given[1]
        rows = math.prod(given[0]) // inner
        return Work("product", flops, moved, dtype, rows, columns, inner, op=op)
    return Work("dense", flops, moved, dtype, op=op)


def left_readers(node: fx.Node) -> int:
    """How many matmuls have the same left operand as this call, as it is or transposed: 1 for a
    call that is no matmul."""
    source = left_source(node)
    if source is None:
        return 1
    seen, count = [source], 0
    for value in seen:
        for user in value.users:
            if is_view(user) and first_input(user) is value:
                seen.append(user)
            else:
                count += _left(user) is value
    return count


def left_source(node: fx.Node) -> fx.Node | None:
    """The node that computes a matmul's left operand; None for what is no matmul."""
    source = _left(node)
    while source is not None and is_view(source):
        source = first_input(source)
    return source


def _left(node: fx.Node) -> fx.Node | None:
    """The left operand of a matmul."""
    if node.target in (GROUPED_MATMUL, EXPERT_GRADIENT):
        return first_input(node)
    if node.op != "call_function" or op_packet(node) not in _MATMULS:
        return None
    return [n for n in node.args if isinstance(n, fx.Node)][-2]


def _grouped(node: fx.Node, sizes: Resolve) -> tuple[int, int, int, int]:
    """Rows, columns and inner size of each matmul of rows with their experts' weights, or of each
    matmul for the weights' gradients, and their number; as if each expert was chosen equally often.
    """
    rows, inner = dims_of(operands(node)[0], sizes)
    if node.target is EXPERT_GRADIENT:
        held, _, columns = dims_of(node, sizes)
        return inner, columns, -(-rows // held), held
    held = dims_of(operands(node)[1], sizes)[0]
    return -(-rows // held), dims_of(node, sizes)[-1], inner, held


def _chunked(node: fx.Node, sizes: Resolve, chunk: int, on: str) -> Work:
    """The matmuls of each chunk, which read the weight again, and what is moved besides."""
    result = chunks_of(node, sizes, chunk, on)
    value = first_input(node).meta["val"]
    dtype, width = str(value.dtype).removeprefix("torch."), value.element_size()
    parts = [
        Work("product", 2 * r * c * i, width * (r * c + (r + c) * i), dtype, r, c, i)
        for r, c, i in result.products
    ]
    parts.append(Work(bytes=result.moved))
    return Work(
        "chunks",
        result.times * sum(p.flops for p in parts),
        result.times * sum(p.bytes for p in parts),
        dtype,
        calls=result.times * (len(result.products) + result.calls),
        parts=tuple(parts),
        times=result.times,
    )


def _aligned(node: fx.Node, sizes: Resolve) -> int:
    """The largest power of two, up to 16, that divides the bytes of a row in memory, for 16-bit
    numbers; the rows of a transposed matrix are its columns."""
    value = node.meta["val"]
    if value.element_size() != 2:
        return 16
    row = -2 if value.stride(-2) == 1 and value.stride(-1) != 1 else -1
    return math.gcd(16, 2 * int(sizes(dims_of(node, sizes)[row])))


def _attention(node: fx.Node, sizes: Resolve, flops: int, moved: int, dtype: str) -> Work:
    backward = "backward" in str(node.target)
    first = 1 if backward else 0  # the backward's first argument is the gradient
    query, key = (dims_of(n, sizes) for n in operands(node)[first : first + 2])
    if is_causal(node):
        seen = min(1.0, (key[-2] + 1) / (2 * query[-2]) if query[-2] == key[-2] else 1.0)
        flops = int(flops * seen)
    kind = "attention backward" if backward else "attention"
    heads = math.prod(query[:-2])
    return Work(kind, flops, moved, dtype, query[-2], key[-2], query[-1], heads)


def node_seconds(node: fx.Node, device: Device, sizes: Resolve) -> float:
    """Seconds of a node on `device`, alone; `sizes` gives numbers for expressions (`Sizes`)."""
    work = node_work(node, sizes)
    return seconds_of(work, device) + work.calls * device.launch_seconds


def step_flops(graph: fx.Graph) -> Amount:
    """FLOPs of a graph, as an expression in the symbols of its sizes."""
    return sympy.expand(sum((node_flops(node) for node in graph.nodes), sympy.Integer(0)))
