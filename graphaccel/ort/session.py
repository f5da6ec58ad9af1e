"""Runs region models in ONNX Runtime on torch's memory, with sessions shared by equal models.

Inputs are read from torch's memory and results are written to torch's: pointers are bound, nothing
is copied (ONNX Runtime's I/O binding).
"""

from __future__ import annotations

import importlib
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.errors import OrtFailed
from graphaccel.ort.dynamic import Merged, Sized
from graphaccel.ort.translate import Port, RegionModel

log = logging.getLogger("graphaccel.ort")

_NUMPY: Mapping[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


@dataclass(frozen=True)
class Opened:
    """An `onnxruntime.InferenceSession`. sizes: inputs it gets besides a region's."""

    session: Any
    sizes: tuple[tuple[str, np.ndarray], ...] = ()


@dataclass
class _ForBatchSizes:
    """Models of one part for different batch sizes. session: of all but the first."""

    models: list[Sized]
    merged: Merged | None = None
    session: Any = None


class Sessions:
    """Sessions by the hash of their model, created on first use. threads: of each session.

    The first model of a region runs with its sizes as constants. Its models for other batch sizes
    share a session that takes their sizes as inputs (`ort.dynamic`).
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self._exact: dict[tuple[str, str], Any] = {}
        self._alike: dict[tuple[str, str], _ForBatchSizes] = {}
        self._first: dict[tuple[str, str, str], tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._exact) + sum(a.session is not None for a in self._alike.values())

    def get(self, model: RegionModel, device: torch.device, name: str) -> Opened:
        """The session that runs a model on the device of its tensors. name: of the region."""
        key, sized = (model.key, str(device)), Sized(model.content)
        first = self._first.setdefault((name, sized.structure, str(device)), key)
        if key in self._exact:
            return Opened(self._exact[key])
        if first == key or first not in self._alike:
            self._exact[key] = self._opened(model.content, model, device)
            self._alike[key] = _ForBatchSizes([sized])
            return Opened(self._exact[key])
        of_sizes = self._alike[first]
        if of_sizes.merged is None or not of_sizes.merged.fits(sized):
            models = [*of_sizes.models, sized]
            merged = Merged(models)
            of_sizes.session = self._opened(merged.content, model, device)
            of_sizes.models, of_sizes.merged = models, merged
        return Opened(of_sizes.session, of_sizes.merged.sizes(sized))

    def _opened(self, content: bytes, model: RegionModel, device: torch.device) -> Any:
        runtime = importlib.import_module("onnxruntime")
        _allocate_plainly(runtime)
        options = session_options(runtime, self.threads or torch.get_num_threads())
        if not model.float32:  # fusions create nodes that have a kernel for float32 only
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        return runtime.InferenceSession(content, options, providers=_providers(device))


def session_options(runtime: Any, threads: int) -> Any:
    """As many threads as torch uses, asleep while torch computes; no memory cached."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    # In the order of the model, which is that of the graph: memory was counted in this order.
    options.execution_order = runtime.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.log_severity_level = 3
    return options


def _allocate_plainly(runtime: Any) -> None:
    """Let sessions that ask for it use plain allocation: the training build's own allocator never
    frees what a session once needed. The setting is ONNX Runtime's, for the whole process."""
    kind = runtime.OrtAllocatorType.ORT_DEVICE_ALLOCATOR
    info = runtime.OrtMemoryInfo("Cpu", kind, 0, runtime.OrtMemType.DEFAULT)
    try:
        runtime.create_and_register_allocator(info, None)
    except Exception as error:  # its exception classes are private and have no common base
        if "already" not in str(error):
            raise


def _providers(device: torch.device) -> list[Any]:
    if device.type == "cuda":
        stream = str(torch.cuda.current_stream(device).cuda_stream)
        settings = {"device_id": str(device.index or 0), "user_compute_stream": stream}
        return [("CUDAExecutionProvider", settings), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


class Region:
    """A call that runs a model: the target of one node in a stage's graph.

    name: module path and phase, for errors. fallback: the region's part of the FX graph, which runs
    where ONNX Runtime fails; without one a failure is an error.

    `region(*tensors) -> list of tensors`, dense, newly allocated; on fake tensors it only computes
    shapes.
    """

    __module__ = "graphaccel.ort"

    def __init__(
        self,
        model: RegionModel,
        sessions: Sessions,
        name: str,
        fallback: fx.GraphModule | None = None,
    ) -> None:
        self.model, self.sessions, self.name, self.fallback = model, sessions, name, fallback
        self._failed = False
        self.__name__ = self.__qualname__ = f"region_{model.key}"
        self._binding: Any = None
        self._session: Any = None
        self._sizes: tuple[tuple[str, np.ndarray], ...] = ()

    def __str__(self) -> str:
        return f"ort.region_{self.model.key}"

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if self._failed and self.fallback is not None:
            return list(self.fallback(*inputs))
        device = inputs[0].device if inputs else torch.device("cpu")
        outputs = [torch.empty(p.shape, dtype=p.dtype, device=device) for p in self.model.outputs]
        if isinstance(outputs[0], FakeTensor):
            return self._ordered(outputs)
        action = "build"
        try:
            if self._session is None:
                opened = self.sessions.get(self.model, device, self.name)
                self._session, self._sizes = opened.session, opened.sizes
                self._binding = self._session.io_binding()
            action = "run"
            given = [_dense(t, p) for t, p in zip(inputs, self.model.inputs, strict=True)]
            self._bind(given, outputs, device)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its exception classes are private and have no common base
            failure = self._failure(action, error)
            if self.fallback is None:
                raise failure from error
            self._failed = True
            log.warning("torch runs this region from now on:\n%s", failure)
            return list(self.fallback(*inputs))
        return self._ordered(outputs)

    def _failure(self, action: str, error: Exception) -> OrtFailed:
        """The error, with the model saved to disk and the op that ONNX Runtime named."""
        path = Path(tempfile.gettempdir()) / f"graphaccel_region_{self.model.key}.onnx"
        path.write_bytes(self.model.content)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        match = re.search(r"\d+_((?:aten|prims)\.[\w.]*\w)", lines[0])
        return OrtFailed(
            region=self.name,
            action=action,
            op=match[1] if match else "",
            path=str(path),
            cause=lines[0],
        )

    def _ordered(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Results with their dims in torch's order."""
        return [
            t.permute(p.back) if p.order else t
            for t, p in zip(outputs, self.model.outputs, strict=True)
        ]

    def _bind(
        self, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        binding, kind, index = self._binding, device.type, device.index or 0
        for name, value in self._sizes:
            binding.bind_cpu_input(name, value)
        for number, (tensor, port) in enumerate(zip(given, self.model.inputs, strict=True)):
            dtype = _NUMPY[port.dtype]
            binding.bind_input(f"i{number}", kind, index, dtype, port.shape, tensor.data_ptr())
        for number, (tensor, port) in enumerate(zip(outputs, self.model.outputs, strict=True)):
            dtype = _NUMPY[port.dtype]
            binding.bind_output(f"o{number}", kind, index, dtype, port.shape, tensor.data_ptr())


def _dense(tensor: torch.Tensor, port: Port) -> torch.Tensor:
    """The tensor in its memory order, as the model expects it; a copy if laid out otherwise."""
    return (tensor.permute(port.order) if port.order else tensor).contiguous()
