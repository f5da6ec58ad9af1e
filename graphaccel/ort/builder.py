"""Builds an ONNX graph value by value, with known shapes and dtypes at every step.

Every node is checked against the kernels of the installed build when it is created, so that a
region that cannot run is declined while planning, with the op that caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

OPSET = 20
IR_VERSION = 9
MICROSOFT = "com.microsoft"

ELEMENT: Mapping[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


class Declined(Exception):
    """A node cannot be part of a region. reason: a phrase that follows the op's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class OnnxValue:
    """A tensor in the ONNX graph."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


HasKernel: TypeAlias = Callable[[onnx.NodeProto, Sequence[OnnxValue], Sequence[OnnxValue]], bool]
Arguments: TypeAlias = Mapping[str, Any]
Translate: TypeAlias = Callable[["Builder", fx.Node, Arguments], Any]
Translations: TypeAlias = Mapping[Any, Translate]


class Builder:
    """An ONNX graph under construction.

    has_kernel: whether the installed build can run a node; None accepts everything. training:
    whether the gradient kernels of a training build may be used.
    """

    def __init__(self, has_kernel: HasKernel | None = None, *, training: bool = False) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, OnnxValue] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.training = training
        self.scope = ""
        self._has_kernel = has_kernel
        self._constants: dict[Any, OnnxValue] = {}
        self._transposes: dict[tuple[str, tuple[int, ...]], OnnxValue] = {}
        self._transposed: dict[str, tuple[OnnxValue, tuple[int, ...]]] = {}

    # ---- nodes

    def op(
        self,
        kind: str,
        *inputs: OnnxValue | None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> OnnxValue:
        """Add a node with one result; shape and dtype default to those of the first input."""
        first = next(i for i in inputs if i is not None)
        result = (
            tuple(first.shape if shape is None else shape),
            first.dtype if dtype is None else dtype,
        )
        return self.ops(kind, *inputs, results=[result], domain=domain, **attributes)[0]

    def ops(
        self,
        kind: str,
        *inputs: OnnxValue | None,
        results: Sequence[tuple[Sequence[int], torch.dtype]],
        domain: str = "",
        **attributes: Any,
    ) -> list[OnnxValue]:
        """Add a node with several results, given as (shape, dtype). Raises Declined."""
        built = [
            OnnxValue(f"v{len(self.values) + i}", d, tuple(s)) for i, (s, d) in enumerate(results)
        ]
        node = helper.make_node(
            kind,
            [i.name if i is not None else "" for i in inputs],
            [m.name for m in built],
            name=f"{len(self.nodes)}_{self.scope}",
            domain=domain,
            **{k: v for k, v in attributes.items() if v is not None},
        )
        given = [i for i in inputs if i is not None]
        if self._has_kernel is not None and not self._has_kernel(node, given, built):
            types = ", ".join(dict.fromkeys(str(i.dtype).removeprefix("torch.") for i in given))
            raise Declined(f"ONNX Runtime has no {domain + '.' if domain else ''}{kind}({types})")
        self.nodes.append(node)
        self.values |= {m.name: m for m in built}
        return built

    def can(self, kind: str, *inputs: OnnxValue, domain: str = MICROSOFT, outputs: int = 1) -> bool:
        """Whether the build has a training kernel `kind` for these inputs."""
        if not self.training or self._has_kernel is None:
            return False
        built = [OnnxValue(f"probe{i}", inputs[0].dtype, inputs[0].shape) for i in range(outputs)]
        names = [i.name for i in inputs]
        node = helper.make_node(kind, names, [m.name for m in built], domain=domain)
        return self._has_kernel(node, inputs, built)

    def constant(self, value: Any, dtype: torch.dtype) -> OnnxValue:
        """A scalar or a (nested) list as an initializer; equal ones are shared."""
        array = np.asarray(value)
        key = (array.tobytes(), array.shape, str(array.dtype), dtype)
        if key not in self._constants:
            tensor = torch.from_numpy(np.array(array)).to(dtype)
            built = OnnxValue(f"c{len(self._constants)}", dtype, tuple(tensor.shape))
            self.initializers[built.name] = _tensor_proto(built.name, tensor)
            self.values[built.name] = self._constants[key] = built
        return self._constants[key]

    def integers(self, values: Sequence[int]) -> OnnxValue:
        """An int64 vector: shapes, axes, indices."""
        return self.constant(np.asarray(list(values), dtype=np.int64), torch.int64)

    # ---- shapes

    def reshape(self, x: OnnxValue, shape: Sequence[int]) -> OnnxValue:
        """The same elements in another shape."""
        if tuple(shape) == x.shape:
            return x
        return self.op("Reshape", x, self.integers(shape), shape=shape)

    def transpose(self, x: OnnxValue, order: Sequence[int]) -> OnnxValue:
        """Permute dims; two consecutive transposes become one, or none if they cancel."""
        if x.name in self._transposed:
            source, before = self._transposed[x.name]
            return self.transpose(source, [before[i] for i in order])
        if list(order) == list(range(len(order))):
            return x
        if (x.name, tuple(order)) in self._transposes:
            return self._transposes[x.name, tuple(order)]
        shape = [x.shape[i] for i in order]
        built = self.op("Transpose", x, shape=shape, perm=list(order))
        self._transposed[built.name] = (x, tuple(order))
        self._transposes[x.name, tuple(order)] = built
        return built

    def untransposed(self, x: OnnxValue) -> tuple[OnnxValue, bool]:
        """(the matrix that `x` is the transpose of, True), or (x, False)."""
        source, order = self._transposed.get(x.name, (x, ()))
        return (source, True) if order == (1, 0) else (x, False)

    def expand(self, x: OnnxValue, shape: Sequence[int]) -> OnnxValue:
        """Broadcast to `shape`."""
        if tuple(shape) == x.shape:
            return x
        return self.op("Expand", x, self.integers(shape), shape=shape)

    def slice(self, x: OnnxValue, dim: int, start: int, stop: int, step: int = 1) -> OnnxValue:
        """x[..., start:stop:step, ...]; bounds within the dim."""
        if (start, stop, step) == (0, x.shape[dim], 1):
            return x
        shape = list(x.shape)
        shape[dim] = max(0, -(-(stop - start) // step))
        bounds = [self.integers([n]) for n in (start, stop, dim, step)]
        return self.op("Slice", x, *bounds, shape=shape)

    def concat(self, xs: Sequence[OnnxValue], dim: int) -> OnnxValue:
        """Concatenate along a dim."""
        xs = [x for x in xs if x.shape[dim]]
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[dim] = sum(x.shape[dim] for x in xs)
        return self.op("Concat", *xs, shape=shape, axis=dim)

    # ---- arithmetic

    def cast(self, x: OnnxValue, dtype: torch.dtype) -> OnnxValue:
        """Cast to another dtype."""
        return x if x.dtype == dtype else self.op("Cast", x, dtype=dtype, to=ELEMENT[dtype])

    def binary(
        self, kind: str, x: OnnxValue, y: OnnxValue, dtype: torch.dtype | None = None
    ) -> OnnxValue:
        """An elementwise node on two broadcast inputs."""
        shape = torch.broadcast_shapes(x.shape, y.shape)
        return self.op(kind, x, y, shape=shape, dtype=dtype)

    def where(self, condition: OnnxValue, x: OnnxValue, y: OnnxValue) -> OnnxValue:
        """Elementwise choice, broadcast."""
        shape = torch.broadcast_shapes(condition.shape, x.shape, y.shape)
        if x.dtype == torch.bool:  # no kernel: use logical ops
            keep = self.binary("And", condition, x)
            other = self.binary("And", self.op("Not", condition), y)
            return self.expand(self.binary("Or", keep, other), shape)
        return self.op("Where", condition, x, y, shape=shape, dtype=x.dtype)

    def reduce(self, kind: str, x: OnnxValue, dims: Sequence[int], keep: bool) -> OnnxValue:
        """ReduceSum and similar over `dims` (none: nothing is reduced)."""
        if not dims:
            return x
        dims = sorted(d % len(x.shape) for d in dims)
        kept = [1 if i in dims else n for i, n in enumerate(x.shape)]
        shape = kept if keep else [n for i, n in enumerate(x.shape) if i not in dims]
        return self.op(kind, x, self.integers(dims), shape=shape, keepdims=int(keep))

    def matmul(self, x: OnnxValue, y: OnnxValue) -> OnnxValue:
        """Matmul over the last two dims; a transposed matrix is read as stored."""
        shape = [*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]]
        if len(x.shape) == len(y.shape) == 2:
            (left, turn), (right, other) = self.untransposed(x), self.untransposed(y)
            if turn or other:
                flags: dict[str, Any] = {"transA": int(turn), "transB": int(other)}
                return self.op("Gemm", left, right, shape=shape, **flags)
        return self.op("MatMul", x, y, shape=shape)

    def scalar(self, value: Any, like: OnnxValue) -> OnnxValue:
        """A number as a Value in the dtype of `like`."""
        return self.constant(value, like.dtype)

    # ---- the model

    def name_outputs(self, values: Sequence[OnnxValue]) -> list[OnnxValue]:
        """Name them o0, o1, ...; a value that is an input, or already an output, is copied."""
        built = {name for node in self.nodes for name in node.output}
        names: dict[str, str] = {}
        results = []
        for number, value in enumerate(values):
            result = OnnxValue(f"o{number}", value.dtype, value.shape)
            self.values[result.name] = result
            results.append(result)
            if value.name in built and value.name not in names:
                names[value.name] = result.name
            else:
                source = names.get(value.name, value.name)
                self.nodes.append(helper.make_node("Identity", [source], [result.name]))
        for node in self.nodes:
            for places in (node.input, node.output):
                for i, name in enumerate(places):
                    places[i] = names.get(name, name)
        return results

    def model(self, inputs: Sequence[OnnxValue], outputs: Sequence[OnnxValue]) -> onnx.ModelProto:
        """The model, without unused nodes."""
        needed = {o.name for o in outputs}
        kept: list[onnx.NodeProto] = []
        for node in reversed(self.nodes):
            if needed & set(node.output):
                kept.append(node)
                needed |= set(node.input)
        kept.reverse()
        domains = {n.domain for n in kept} - {""}
        graph = helper.make_graph(
            kept,
            "region",
            [_info(i) for i in inputs],
            [_info(o) for o in outputs],
            [t for n, t in self.initializers.items() if n in needed],
        )
        imports = [helper.make_opsetid("", OPSET)]
        imports += [helper.make_opsetid(d, 1) for d in sorted(domains)]
        return helper.make_model(
            graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="graphaccel"
        )


def _info(value: OnnxValue) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, ELEMENT[value.dtype], list(value.shape))


def _tensor_proto(name: str, tensor: torch.Tensor) -> onnx.TensorProto:
    if tensor.dtype == torch.bfloat16:
        raw = tensor.contiguous().view(torch.int16).numpy().tobytes()
        return helper.make_tensor(name, ELEMENT[tensor.dtype], list(tensor.shape), raw, raw=True)
    return numpy_helper.from_array(tensor.numpy(), name)
