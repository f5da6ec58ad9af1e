"""Inductor's kernels for a GPU that is not there: graphs are lowered and fused, not compiled.

`pretended()` mocks the properties of an H200, `kernels(graph)` runs Inductor on a graph of fake
tensors up to and with its scheduler, which decides what is fused, and stops before code is made. So
neither a GPU nor Triton is needed, and launches and bytes are Inductor's own counts.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.device_interface as device_interface
import torch._guards as guards
import torch._inductor.codegen.cuda_combined_scheduling
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.fuse_attention as fuse_attention
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.pad_mm as pad_mm
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.scheduler as scheduler
import torch.utils._triton as triton_support
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.cpp_extension import include_paths

from benchmarks.shared.launches import Launch
from graphaccel.capture.export.export import ForwardGraph
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.ir.values import returned

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
NAME = "NVIDIA H200"
_OF_THE_HOST = ("tensor_meta", "eager_input_vals")
_PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, gcnArchName="",
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, clock_rate=1980000,
    memory_clock_rate=3201000, memory_bus_width=6144, max_threads_per_block=1024, is_integrated=0,
    is_multi_gpu_board=0, uuid="0", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
)  # fmt: skip


_GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@cache
def register_device_guard() -> None:
    """Ops on fake CUDA tensors ask for a device guard, which a CPU build of torch does not have:
    one that does nothing is compiled (seconds) and loaded."""
    if torch.version.cuda is not None:
        return
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD)
        includes = [f"-I{path}" for path in include_paths()]
        links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10"]
        options = ["-O0", "-shared", "-fPIC", "-std=c++20", *includes]
        subprocess.run(
            [get_cpp_compiler(), *options, str(source), *links, "-o", str(library)], check=True
        )
        ctypes.CDLL(str(library))


class _Stop(Exception):
    """What is wanted is known."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


@contextmanager
def pretended() -> Iterator[None]:
    """Torch sees one H200; graphs of fake tensors on it can be given to `kernels`."""
    register_device_guard()
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()
    cuda = dict(
        is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        get_device_properties=lambda device=None: _PROPERTIES,
        get_device_capability=lambda device=None: (9, 0), get_device_name=lambda device=None: NAME,
        is_initialized=lambda: True, _lazy_init=lambda: None, synchronize=lambda device=None: None,
        is_bf16_supported=lambda *a, **k: True, get_arch_list=lambda: ["sm_90"],
        mem_get_info=lambda device=None: (140 << 30, 141 << 30),
        get_rng_state=lambda *a, **k: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *a, **k: None, _exchange_device=lambda index: 0,
        _maybe_exchange_device=lambda index: 0,
    )  # fmt: skip
    interface = dict(
        get_device_properties=lambda device=None: _PROPERTIES,
        get_compute_capability=lambda device=None: 90, is_available=lambda: True,
        current_device=lambda: 0, device_count=lambda: 1, is_triton_capable=lambda *a, **k: True,
        is_bf16_supported=lambda *a, **k: True, is_dtype_supported=lambda *a, **k: True,
        raise_if_triton_unavailable=lambda *a, **k: None, get_raw_stream=lambda *a: 0,
        synchronize=lambda *a: None,
    )  # fmt: skip
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in interface.items():
            stack.enter_context(
                patch.object(device_interface.CudaInterface, name, staticmethod(value))
            )
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        for module in (triton_support, scheduler):
            stack.enter_context(patch.object(module, "has_triton", lambda *a, **k: True))
        stack.enter_context(patch.object(joint_graph, "lazy_init", lambda *a, **k: None))
        stack.enter_context(patch.object(post_grad, "lazy_init", lambda *a, **k: None))
        stack.enter_context(patch.object(fuse_attention, "_sfdp_init", lambda *a, **k: None))
        stack.enter_context(patch.object(pad_mm, "_should_pad", _should_pad))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", _stop))
        stack.enter_context(
            inductor_config.patch(
                force_disable_caches=True, compile_threads=1, joint_graph_constant_folding=False
            )
        )
        yield


def _should_pad(match: Any, a: torch.Tensor, b: torch.Tensor, op: Any, input: Any = None) -> bool:
    """In place of a measurement: cuBLAS is slow where rows are no multiples of 16 bytes."""
    if op is aten.bmm:
        return False
    (m, k), n = a.shape, b.shape[1]
    return any(int(size) % 8 for size in (m, k, n)) and pad_mm.is_mm_compute_bound(m, k, n, a.dtype)


def _stop(lowering: Any) -> Any:
    lowering._update_scheduler()
    found = []
    for node in lowering.scheduler.nodes:
        op = ""
        if node.is_extern():
            op = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        if type(node).__name__ != "NopKernelSchedulerNode" and op != "MultiOutput":
            found.append(Launch(_name(str(op)), int(node.get_read_write_buffers_sizes())))
    raise _Stop(found)


def _name(kernel: str) -> str:
    """`aten::mm` for extern_kernels.mm, `graphaccel::op` for torch.ops.graphaccel.op.default."""
    if kernel.startswith("torch.ops."):
        return "::".join(kernel.split(".")[2:4])
    return kernel.replace("extern_kernels.", "aten::")


def kernels(graph: fx.GraphModule, *, backward: bool = False) -> list[Launch]:
    """What Inductor launches for a functional graph of fake CUDA tensors that returns a tuple."""
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    mode = fake_mode_of(list(graph.graph.nodes))
    with V.set_fake_mode(mode), guards.tracing(guards.TracingContext(mode)):
        try:
            compile_fx_inner(
                graph,
                inputs,
                is_backward=backward,
                cudagraphs=False,
                static_input_idxs=(),
                boxed_forward_device_index=None,
            )
        except Exception as error:
            inner = error
            while inner is not None and not isinstance(inner, _Stop):
                inner = getattr(inner, "inner_exception", None) or inner.__cause__
            if inner is None:
                raise
            return inner.found
    raise AssertionError("Inductor did not reach its scheduler")


def is_opaque(node: fx.Node) -> bool:
    """Whether a call is one of ours to Inductor, with launches inside that it does not see."""
    return getattr(node.target, "namespace", "") == "graphaccel" or "attention_for_cpu" in str(
        node.target
    )


def compiled_piece(piece: fx.GraphModule, *, backward: bool) -> list[Launch]:
    """What Inductor launches for a graph of fake tensors, without its opaque calls."""
    values = [n.meta["val"] for n in piece.graph.nodes if n.op == "placeholder"]
    mode = fake_mode_of(list(piece.graph.nodes))
    with mode, torch.no_grad():
        traced = make_fx(piece, decomposition_table=select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    with pretended():
        found = kernels(_joint_passes(traced, mode), backward=backward)
    return _without_opaque(found)


def _without_opaque(found: Iterable[Launch]) -> list[Launch]:
    ours = ("graphaccel::", "aten::_scaled_dot_product_flash_attention_for_cpu")
    return [k for k in found if not k.op.startswith(ours)]


def _joint_passes(graph: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """The graph on the pretended device, after Inductor's passes for joint graphs."""
    joint_graph.constant_fold_uniform_value(graph)  # it computes constants, which needs a device
    moved = on_cuda(graph, mode)
    with V.set_fake_mode(mode):
        return _recursive_joint_graph_passes(moved)


def compiled_phases(forward: ForwardGraph) -> list[tuple[list[Launch], fx.GraphModule]]:
    """What `torch.compile` launches for a captured forward, without its opaque calls, and its
    graph; then the same of the backward."""
    joint, inputs, mode, settings = _joint(forward)
    settings.pop("static_lifetime_input_indices", None)
    with pretended():
        moved = _joint_passes(joint, mode)
        with guards.tracing(guards.TracingContext(mode)):
            first, second = min_cut_rematerialization_partition(
                moved, inputs, compiler="inductor", **settings
            )
        return [
            (_without_opaque(kernels(graph, backward=graph is second)), graph)
            for graph in (first, second)
        ]


def _joint(forward: ForwardGraph) -> tuple[fx.GraphModule, Any, Any, dict[str, Any]]:
    """The joint graph that AOT autograd makes of a forward, for its loss."""
    graph, copies = fx.Graph(), {}
    graph.graph_copy(forward.graph.graph, copies)
    kinds = [o.kind for o in forward.outputs]
    graph.output((copies[returned(forward.graph)[kinds.index("loss")]],))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    module = fx.GraphModule(forward.graph, graph)
    module.graph.eliminate_dead_code()
    values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    mode, found = values[0].fake_mode, []

    def partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        found.append((joint, inputs, mode, settings))
        raise _Stop(())

    with mode:
        given = [
            torch.empty_strided(
                [int(n) for n in value.shape], [int(n) for n in value.stride()], dtype=value.dtype,
                requires_grad=spec.kind == "parameter",
            )
            for value, spec in zip(values, forward.inputs, strict=True)
        ]  # fmt: skip
        with suppress(_Stop):
            aot_module_simplified(
                module, given, fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: g,
                partition_fn=partition, decompositions=select_decomp_table(),
            )  # fmt: skip
    return found[0]


def bytes_of(values: Iterable[Any]) -> int:
    """Bytes of tensors."""
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def on_cuda(graph: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """A copy of a graph with its fake values on the pretended device."""
    made, moved = fx.Graph(), {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    for node in graph.graph.nodes:
        if node.op == "output":
            results = fx.node.map_arg(node.args[0], lambda n: moved[n])
            results = results if isinstance(results, (tuple, list)) else (results,)
            made.output(tuple(results))
            continue
        copy = moved[node] = made.node_copy(node, lambda n: moved[n])
        copy.meta = {k: v for k, v in node.meta.items() if k not in _OF_THE_HOST}
        if "val" in node.meta:
            copy.meta["val"] = pytree.tree_map(move, node.meta["val"])
        place = lambda a: CUDA if isinstance(a, torch.device) else a  # noqa: E731
        copy.args = fx.node.map_aggregate(copy.args, place)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, place)
    return fx.GraphModule(graph, made)
