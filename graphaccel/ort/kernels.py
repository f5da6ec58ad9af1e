"""Finds out which nodes the installed ONNX Runtime can run, by creating sessions of single nodes.

A build has a kernel for some dtypes of an op and not for others, and reports it only when a session
is created. A session of one node takes about a millisecond; each query is made once.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import helper

from graphaccel.ort.builder import ELEMENT, IR_VERSION, OPSET, OnnxValue

TRAINING, PLAIN = "training", "plain"


@dataclass
class Kernels:
    """One installed build: "training" or "plain", its version, and its answers so far."""

    build: str
    version: str
    known: dict[Any, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """For example `training 1.19.2`."""
        return f"{self.build} {self.version}"

    def __call__(
        self, node: onnx.NodeProto, inputs: Sequence[OnnxValue], outputs: Sequence[OnnxValue]
    ) -> bool:
        """Whether a session with this node can be created."""
        if _unsound(node) and any(i.dtype == torch.float16 for i in inputs):
            return False
        types = (tuple(i.dtype for i in inputs), tuple(o.dtype for o in outputs))
        key = (node.domain, node.op_type, len(node.input), types)
        if key not in self.known:
            self.known[key] = _refusal(node, inputs, outputs)
        return not self.known[key]

    def binds(self, dtype: torch.dtype) -> bool:
        """Whether tensors of a dtype can be bound to a session: before 1.20, no bfloat16."""
        if dtype != torch.bfloat16:
            return True
        if dtype not in self.known:
            x, y = OnnxValue("x", dtype, (1,)), OnnxValue("y", dtype, (1,))
            node = helper.make_node("Identity", ["x"], ["y"])
            self.known[dtype] = _refusal(node, [x], [y], bind=True)
        return not self.known[dtype]


def installed() -> Kernels | None:
    """The installed build, None without one (or with one that does not import)."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    try:
        runtime = importlib.import_module("onnxruntime")
        version = runtime.__version__
    except (ImportError, AttributeError):
        return None
    training = importlib.util.find_spec("onnxruntime.training") is not None
    kernels = Kernels(TRAINING if training else PLAIN, version)
    return kernels


def missing_reason() -> str:
    """Why there is no usable ONNX Runtime on this machine."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "the package onnxruntime is not installed"
    try:
        importlib.import_module("onnxruntime")
    except ImportError as error:
        return f"the package onnxruntime does not import: {error}"
    return "the package onnxruntime is not complete"


def _unsound(node: onnx.NodeProto) -> bool:
    """Whether a float16 node is faulty in 1.19: its session can be created, but then writes past
    the end of the result (Min, Max), or reports at run time that it cannot add (the others)."""
    adds = any(a.name == "reduction" and a.s != b"none" for a in node.attribute)
    return node.op_type in ("Min", "Max") or adds


def _refusal(
    node: onnx.NodeProto,
    inputs: Sequence[OnnxValue],
    outputs: Sequence[OnnxValue],
    bind: bool = False,
) -> str:
    """Why the build cannot run a node, "" if it can. bind: also bind its inputs in place."""
    runtime = importlib.import_module("onnxruntime")
    given = {i.name: i for i in inputs}
    graph = helper.make_graph(
        [node],
        "probe",
        [helper.make_tensor_value_info(n, ELEMENT[i.dtype], i.shape) for n, i in given.items()],
        [helper.make_tensor_value_info(o.name, ELEMENT[o.dtype], o.shape) for o in outputs],
    )
    imports = [helper.make_opsetid("", OPSET)]
    if node.domain:
        imports.append(helper.make_opsetid(node.domain, 1))
    model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    providers = runtime.get_available_providers()
    try:
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=providers)
        for i in inputs if bind else ():
            place = torch.empty(i.shape, dtype=i.dtype)
            session.io_binding().bind_input(
                i.name, "cpu", 0, ELEMENT[i.dtype], i.shape, place.data_ptr()
            )
    except Exception as error:  # its exception classes are private and have no common base
        return str(error).strip().splitlines()[0] or type(error).__name__
    return ""
