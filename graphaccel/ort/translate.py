"""Translates a region of an FX graph into an ONNX model.

before                                                      after (onnx.printer)
  %t: f32[32,64] = aten.t(%w)                                 v0 = Gemm <transB = 1> (i0, i1)
  %mm: f32[8,64] = aten.mm(%x, %t)

Identical regions give identical bytes: values are numbered, and no names of the user's model are in
it.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.ir.calls import is_random
from graphaccel.ir.text import target_text
from graphaccel.ir.values import operands, tensors_of
from graphaccel.ort.builder import ELEMENT, Builder, Declined, OnnxValue
from graphaccel.ort.kernels import TRAINING, Kernels
from graphaccel.ort.liveness import scratch_bytes
from graphaccel.ort.ops.table import TRANSLATIONS, arguments
from graphaccel.sharding.rules.ops.collectives import is_message


@dataclass(frozen=True)
class Port:
    """One input or output of a region.

    shape: as the session sees it, contiguous. order: the dims of torch's tensor in memory order
    (empty: unpermuted); the model transposes inputs back and results there.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def back(self) -> tuple[int, ...]:
        """The inverse permutation of `order`."""
        return tuple(sorted(range(len(self.order)), key=lambda i: self.order[i]))


@dataclass(frozen=True)
class RegionModel:
    """An ONNX model with the metadata needed to run it.

    content: the serialised model. key: hash of it. ops: the ATen ops in it, in order. scratch: peak
    bytes of the values inside.
    """

    content: bytes = field(repr=False)
    key: str
    inputs: tuple[Port, ...] = field(repr=False)
    outputs: tuple[Port, ...] = field(repr=False)
    ops: tuple[str, ...] = field(repr=False)
    scratch: int = 0

    @property
    def float32(self) -> bool:
        """Whether no input or output has another floating dtype than float32."""
        dtypes = {p.dtype for p in (*self.inputs, *self.outputs)}
        return all(d == torch.float32 or not d.is_floating_point for d in dtypes)


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers; attention without dropout does not, though its tag says
    so."""
    if "attention" in str(node.target):
        return bool(arguments(node).get("dropout_p"))
    return is_random(node)


def refusal(node: fx.Node, kernels: Kernels) -> str | None:
    """Why a call cannot be part of a region, None if it can."""
    if node.meta.get("bind"):
        return "its numbers depend on the rank"
    if is_message(node.target):
        return "it is a collective"
    if draws(node):
        return "it draws random numbers"
    if any(n.meta.get("chosen") for n in (node, *node.all_input_nodes)):
        return "its sizes depend on data"
    if node.target is operator.getitem:
        return None
    declared = getattr(node.target, "_schema", None)
    if declared is not None and declared.is_mutable:
        return "it writes into its input"
    if node.target not in TRANSLATIONS:
        return "it has no ONNX translation"
    for value in [node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes)]:
        for tensor in tensors_of(value):
            if tensor.dtype not in ELEMENT:
                return f"ONNX has no {tensor.dtype}"
            if not kernels.binds(tensor.dtype):
                return f"ONNX Runtime {kernels.version} takes no {tensor.dtype}"
            if tensor.numel() == 0:
                return "it has a tensor without elements"
    builder = Builder(kernels, training=kernels.build == TRAINING)
    try:
        sources = {n: _stand_in(builder, n) for n in node.all_input_nodes}
        _call(builder, node, sources)
    except Declined as declined:
        return declined.reason
    return None


def translate(
    nodes: Sequence[fx.Node],
    inputs: Mapping[fx.Node, torch.Tensor],
    outputs: Sequence[fx.Node],
    kernels: Kernels | None,
) -> RegionModel:
    """The model of some calls, in order.

    inputs: input values, with fake tensors in the memory layout that they will have. outputs:
    values that others read; their memory layout is preserved, except for gaps.

    Raises Declined where a call has no translation.
    """
    builder = Builder(kernels, training=kernels is not None and kernels.build == TRAINING)
    values: dict[fx.Node, Any] = {}
    ports, given = [], []
    for number, (node, tensor) in enumerate(inputs.items()):
        port = _port(tensor)
        value = OnnxValue(f"i{number}", port.dtype, port.shape)
        builder.values[value.name] = value
        ports.append(port)
        given.append(value)
        values[node] = _restored(builder, value, port)
    for node in nodes:
        builder.scope = target_text(node.target)
        values[node] = _call(builder, node, values)
    results = [_port(n.meta["val"]) for n in outputs]
    built = builder.name_outputs(
        [
            builder.transpose(values[n], p.order) if p.order else values[n]
            for n, p in zip(outputs, results, strict=True)
        ]
    )
    model = builder.model(given, built)
    content = model.SerializeToString(deterministic=True)
    return RegionModel(
        content,
        hashlib.sha256(content).hexdigest()[:16],
        tuple(ports),
        tuple(results),
        tuple(target_text(n.target) for n in nodes),
        scratch_bytes(model.graph, builder.values),
    )


def _call(builder: Builder, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The Value (or several) of one call. Raises Declined."""
    if node.target is operator.getitem:
        source, index = operands(node)
        return values[source][index]
    given = {name: map_arg(value, lambda n: values[n]) for name, value in arguments(node).items()}
    built = TRANSLATIONS[node.target](builder, node, given)
    for value, tensor in zip(_listed(built), _listed(node.meta["val"]), strict=True):
        if value is None or tensor is None:
            continue
        if (value.shape, value.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise Declined(f"its translation gives {value.dtype}{list(value.shape)}")
    return built


def _listed(built: Any) -> list[Any]:
    return list(built) if isinstance(built, (list, tuple)) else [built]


def _stand_in(builder: Builder, node: fx.Node) -> Any:
    """Inputs for a call that is tried by itself."""

    def value(tensor: Any) -> OnnxValue:
        built = OnnxValue(f"s{len(builder.values)}", tensor.dtype, tuple(tensor.shape))
        builder.values[built.name] = built
        return built

    held = node.meta["val"]
    return [value(t) for t in held] if isinstance(held, (list, tuple)) else value(held)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of a dense tensor in memory order, None if it is not dense."""
    dims = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), -tensor.shape[d], d))
    expected = 1
    for dim in reversed(dims):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return None
        expected *= tensor.shape[dim]
    return tuple(dims)


def _port(tensor: torch.Tensor) -> Port:
    if tensor.is_contiguous():
        return Port(tensor.dtype, tuple(tensor.shape))
    order = memory_order(tensor)
    if order is None:  # the pass copies inputs with gaps, and results have none
        return Port(tensor.dtype, tuple(tensor.shape))
    return Port(tensor.dtype, tuple(tensor.shape[d] for d in order), order)


def _restored(builder: Builder, value: OnnxValue, port: Port) -> OnnxValue:
    """The tensor with its dims in torch's order."""
    return builder.transpose(value, port.back) if port.order else value
