"""Counts what a graph would launch on a GPU, call by call, fused ops from the inside.

A fused op is run as its `cuda_forward` or `cuda_backward`: torch's calls in it are counted, and
each launch of a Triton kernel. Every tensor that a launch reads or writes counts once for reading
and once for writing; a kernel that overwrites an operand reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphaccel.kernels.jit as kernel_jit
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.kernels import accumulate
from graphaccel.kernels.casts import CAST_ALL, cast_all

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
SYNCHRONISING = ("nonzero", "_local_scalar_dense", "item", "masked_select", "bincount")
_TENSORS, _BLOCKS, _BLOCK = 64, 320, 65536  # of ATen/native/cuda/MultiTensorApply.cuh
_FREE = ("empty", "new_empty", "detach", "alias", "lift", "_unsafe_view")


@dataclass(frozen=True)
class Launch:
    """One launch: its op or kernel ("" where Inductor makes it), and the bytes that it moves."""

    op: str
    bytes: int

    @property
    def product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return self.op.rpartition("::")[2].partition(".")[0] in PRODUCTS

    @property
    def attention(self) -> bool:
        """Whether it is a kernel of torch's attention."""
        return "scaled_dot_product" in self.op


class _Kernel:
    """In place of a Triton kernel: its launches are counted."""

    found: list[Launch] | None = None

    def __init__(self, function: Any) -> None:
        self.name = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **fixed: Any) -> None:
            assert _Kernel.found is not None
            times = 2 if "in_place" in self.name else 1
            moved = _bytes(a for a in (*args, *fixed.values()) if isinstance(a, Tensor))
            _Kernel.found.append(Launch(f"triton::{self.name}", times * moved))

        return launch


def count_kernels() -> None:
    """From now on kernels that are defined are counted instead of compiled. Call it before any
    module of `graphaccel.kernels` but `jit` is imported."""
    kernel_jit.jit = _Kernel
    kernel_jit.triton = object()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(_memory, {id(t): t for t in tensors}.values()))


def _memory(tensor: Tensor) -> int:
    """Bytes of the memory that a tensor shows: what is expanded is there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(n for n, step in sizes if step or not n)


class Launches(TorchDispatchMode):
    """Collects the launches of what runs under it, on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = gpu_function(func)
        if inside is not None:
            with self, kernels_into(self.found):
                return inside(*args, **(kwargs or {}))
        name = func.name()
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if func.is_view or name.split("::")[1].startswith(_FREE):
            return made
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        moved = _read(name, given, results) + _bytes(results)
        times = _launches_for(args[0]) if "_foreach_" in name else 1
        self.found += [Launch(name, moved // times)] * times
        return made


def _launches_for(tensors: list[Tensor]) -> int:
    """Launches of a call on a list of tensors: of `multi_tensor_apply` each has so many tensors and
    blocks at most."""
    blocks = sum(-(-t.numel() // _BLOCK) for t in tensors)
    return max(-(-len(tensors) // _TENSORS), -(-blocks // _BLOCKS))


def _read(name: str, given: list[Tensor], results: list[Tensor]) -> int:
    """Bytes read; a lookup reads as much of its table as it returns."""
    if name.split("::")[1] in ("embedding", "index.Tensor", "gather", "index_select"):
        return _bytes(results) + _bytes(given[1:])
    return _bytes(given)


@contextmanager
def kernels_into(found: list[Launch]) -> Iterator[None]:
    """Collect launches of Triton kernels."""
    before, _Kernel.found = _Kernel.found, found
    with (
        patch.object(accumulate, "adds_wide", lambda device: True),
        patch.object(accumulate.torch, "addmm", _addmm) if before is None else nullcontext(),
    ):
        try:
            yield
        finally:
            _Kernel.found = before


def _addmm(into: Tensor, a: Tensor, b: Tensor, *, beta: int, **_: Any) -> Tensor:
    """In place of `torch.addmm` into a float32 sum, which fake tensors do not know."""
    assert _Kernel.found is not None
    _Kernel.found.append(Launch("aten::addmm", _bytes((into, a, b)) + beta * _bytes((into,))))
    return into


def gpu_function(op: Any) -> Any:
    """What an op of graphaccel, or attention of a captured graph, runs on a CUDA device."""
    from graphaccel.kernels.ops import attention_cuda
    from graphaccel.kernels.register import fusion_of, is_backward

    own = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            attention_cuda.attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            attention_cuda.attention_backward,
        accumulate.WIDE_PRODUCT: accumulate.wide_product,
        CAST_ALL: cast_all,
    }  # fmt: skip
    fusion = fusion_of(op)
    if fusion is None:
        return own.get(op)
    return (fusion.cuda_backward if is_backward(op) else fusion.cuda_forward) or (
        fusion.backward if is_backward(op) else fusion.forward
    )


def launches_of(graph: fx.GraphModule, chosen: Any = None) -> list[Launch]:
    """Launches of a graph whose values are fake tensors, run call by call.

    chosen: only of nodes for which it returns true.
    """
    counted, mode = Launches(), fake_mode_of(list(graph.graph.nodes))
    for node in graph.graph.nodes:
        if node.op != "call_function" or not hasattr(node.target, "namespace"):
            continue
        if chosen is None or chosen(node):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            with mode, torch.no_grad(), counted:
                node.target(*args, **kwargs)
    return counted.found
