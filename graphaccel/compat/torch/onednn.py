"""oneDNN: its linear op, and whether float32 matmuls by MKL are far slower than it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_onednn() -> Iterator[None]:
    """Meanwhile no op of oneDNN is chosen. The public flag can not be set in a process that froze
    torch's global flags, as one that imports torch.testing does."""
    enabled: Any = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def mkl_is_slow() -> bool:
    """Whether float32 matmuls by MKL run far below this CPU's speed while oneDNN's do not: MKL
    takes its AVX-512 code on Intel's processors only."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not torch.backends.mkldnn.enabled or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return "GenuineIntel" not in file.read(4096)
    except OSError:
        return False


def onednn_linear() -> Any:
    """`(x [m, k], w [n, k], bias [n] or None, "none", [], "")` → x wᵀ + bias by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default


def opaque_linear() -> Any:
    """oneDNN's linear as an op that compilers do not lower."""
    name, ops = "onednn_linear", torch.ops.graphaccel
    if not hasattr(ops, name):
        library = torch.library.Library("graphaccel", "FRAGMENT")
        library.define(f"{name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")

        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return onednn_linear()(x, weight, bias, "none", [], "")

        def fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return x.new_empty((*x.shape[:-1], weight.shape[0]))

        library.impl(name, run, "CPU")
        torch.library.register_fake(f"graphaccel::{name}", fake, lib=library)
        built: Any = ops.onednn_linear.default
        built.graphaccel_library = library  # it lives as long as its op
    return ops.onednn_linear.default
