"""Merges models that differ only in their sizes (other batch sizes) into one dynamic session.

A model is built for one batch and contains its sizes, as shapes of its inputs and in constants (the
shape of a `Reshape`, the ends of a `Slice`, one over the number of rows). Models with the same
nodes are merged: the constants that differ become inputs, the dims that differ become dynamic. Only
what was observed to differ is merged, so that nothing is guessed.

before, for 8 rows and for 6                       after
  agraph (float[8,4] i0) => (float[16,2] o0)         agraph (float[d0,4] i0, int64[2] s0)
  <int64[2] c0 = {16,2}>                                    => (float[d1,2] o0)
  { o0 = Reshape (i0, c0) }                          { o0 = Reshape (i0, s0) }
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
from onnx import numpy_helper

Use = tuple[int, int]
"""An input of a node: (number of the node, index of the input)."""


@dataclass(frozen=True)
class Sized:
    """A region's model, separated into the parts that contain sizes and those that do not."""

    content: bytes = field(repr=False)

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model."""
        return onnx.ModelProto.FromString(self.content)

    @cached_property
    def constants(self) -> Mapping[Use, onnx.TensorProto]:
        """The constant of each node input that is one: equal ones are shared in the model, also
        those equal by chance."""
        known = {t.name: t for t in self.proto.graph.initializer}
        return {
            (n, i): known[name]
            for n, node in enumerate(self.proto.graph.node)
            for i, name in enumerate(node.input)
            if name in known
        }

    @cached_property
    def structure(self) -> str:
        """A hash of what two models must have in common to be merged: everything but the dims of
        inputs and results and the values of constants."""
        graph, digest = self.proto.graph, hashlib.sha256()
        built = {name: f"{n}.{i}" for n, node in enumerate(graph.node)
                for i, name in enumerate(node.output)}  # fmt: skip
        built |= {value.name: value.name for value in graph.input}
        for n, node in enumerate(graph.node):
            bare = onnx.NodeProto()
            bare.CopyFrom(node)
            bare.ClearField("name")
            for i, name in enumerate(node.input):
                tensor = self.constants.get((n, i))
                kind = None if tensor is None else f"{tensor.data_type}:{len(tensor.dims)}"
                bare.input[i] = f"constant {kind}" if kind else built.get(name, "")
            del bare.output[:]
            digest.update(bare.SerializeToString(deterministic=True))
            digest.update(str(len(node.output)).encode())
        for value in (*graph.input, *graph.output):
            kind = value.type.tensor_type
            named = built.get(value.name, "")
            digest.update(f"{named} {kind.elem_type} {len(kind.shape.dim)}".encode())
        return digest.hexdigest()


class Merged:
    """Models of one structure merged into one, with inputs for what differs between them."""

    def __init__(self, models: Sequence[Sized]) -> None:
        """models: two or more, of the same structure."""
        first = models[0]
        self._fixed: dict[Use, bytes] = {}
        groups: dict[tuple[bytes, ...], list[Use]] = {}
        for use in first.constants:
            values = tuple(_value(m.constants[use]) for m in models)
            if len(set(values)) == 1:
                self._fixed[use] = values[0]
            else:
                groups.setdefault(values, []).append(use)
        self._groups = list(groups.values())
        self._open = {
            (kind, i, d)
            for kind in ("input", "output")
            for i, value in enumerate(getattr(first.proto.graph, kind))
            for d in range(len(value.type.tensor_type.shape.dim))
            if len({_dims(m, kind, i)[d] for m in models}) > 1
        }
        self._closed = _closed(first, self._open)
        self.content = self._merged(first)

    def fits(self, model: Sized) -> bool:
        """Whether a model of the same structure differs in nothing beyond the merged inputs and
        dims."""
        same = all(_value(model.constants[use]) == value for use, value in self._fixed.items())
        all_equal = all(
            len({_value(model.constants[use]) for use in uses}) == 1 for uses in self._groups
        )
        return same and all_equal and _closed(model, self._open) == self._closed

    def sizes(self, model: Sized) -> tuple[tuple[str, np.ndarray], ...]:
        """The additional inputs with which the merged model computes what `model` does: (input,
        value)."""
        return tuple(
            (f"s{n}", numpy_helper.to_array(model.constants[uses[0]]))
            for n, uses in enumerate(self._groups)
        )

    def _merged(self, first: Sized) -> bytes:
        model_proto = onnx.ModelProto()
        model_proto.CopyFrom(first.proto)
        graph = model_proto.graph
        for n, uses in enumerate(self._groups):
            tensor = first.constants[uses[0]]
            shape = [f"s{n}_{i}" for i in range(len(tensor.dims))]
            graph.input.append(onnx.helper.make_tensor_value_info(f"s{n}", tensor.data_type, shape))
            for node, i in uses:
                graph.node[node].input[i] = f"s{n}"
        for kind, i, d in self._open:
            dim = getattr(graph, kind)[i].type.tensor_type.shape.dim[d]
            dim.dim_param = f"{kind}{i}_{d}"
        read = {name for node in graph.node for name in node.input}
        kept = [t for t in graph.initializer if t.name in read]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        return model_proto.SerializeToString(deterministic=True)


def _value(tensor: onnx.TensorProto) -> bytes:
    array = numpy_helper.to_array(tensor)
    return str(array.shape).encode() + array.tobytes()


def _dims(model: Sized, kind: str, i: int) -> tuple[int, ...]:
    value = getattr(model.proto.graph, kind)[i]
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _closed(model: Sized, opened: set[tuple[str, int, int]]) -> tuple[int, ...]:
    """The dims that are equal in all models."""
    return tuple(
        size
        for kind in ("input", "output")
        for i in range(len(getattr(model.proto.graph, kind)))
        for d, size in enumerate(_dims(model, kind, i))
        if (kind, i, d) not in opened
    )
