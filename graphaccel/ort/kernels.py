"""What the installed ONNX Runtime can run, found out by asking it.

A build has a kernel for some dtypes of an op and not for others, and says so nowhere but when a
session is made. A session of one node takes about a millisecond; each question is asked once.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import helper

from graphaccel.ort.builder import ELEMENT, IR_VERSION, OPSET, Value

TRAINING, PLAIN = "training", "plain"


@dataclass
class Kernels:
    """One installed build: "training" or "plain", its version, and what it answered so far."""

    build: str
    version: str
    known: dict[Any, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """`training 1.19.2`"""
        return f"{self.build} {self.version}"

    def __call__(
        self, node: onnx.NodeProto, inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> bool:
        """Whether a session with this node can be made."""
        types = (tuple(i.dtype for i in inputs), tuple(o.dtype for o in outputs))
        key = (node.domain, node.op_type, len(node.input), types)
        if key not in self.known:
            self.known[key] = _refusal(node, inputs, outputs)
        return not self.known[key]


def installed() -> Kernels | None:
    """The build that is installed, None without one (or with one that does not import)."""
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
    """Why there is no usable ONNX Runtime here."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "the package onnxruntime is not installed"
    try:
        importlib.import_module("onnxruntime")
    except ImportError as error:
        return f"the package onnxruntime does not import: {error}"
    return "the package onnxruntime is not complete"


def _refusal(node: onnx.NodeProto, inputs: Sequence[Value], outputs: Sequence[Value]) -> str:
    """Why the build can not run a node, "" if it can."""
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
        runtime.InferenceSession(model.SerializeToString(), options, providers=providers)
    except Exception as error:  # its exception classes are private and have no common base
        return str(error).strip().splitlines()[0] or type(error).__name__
    return ""
