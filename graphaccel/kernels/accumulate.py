"""Matmuls of 16-bit matrices with results in float32, in the matmul itself where possible."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def add_product(into: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """`into += a @ b`, or `into = a @ b` where `first`: the content is then not read. a: [m, k] and
    b: [k, n], of one dtype; into: [m, n], of the same dtype or float32.

    On a GPU whose BLAS library supports it the sum in float32 is made by the product; otherwise it
    is a pass of its own over a product in 16 bits.
    """
    if into.dtype == a.dtype:
        into.addmm_(a, b, beta=0 if first else 1)
    elif adds_wide(a.device):
        torch.addmm(into, a, b, beta=0 if first else 1, out_dtype=into.dtype, out=into)
    elif first:
        into.copy_(a @ b)
    else:
        into.add_(a @ b)


@cache
def adds_wide(device: torch.device) -> bool:
    """Whether a product of bfloat16 matrices can be added to a float32 one in place, as of torch
    2.10 on NVIDIA GPUs: found by doing it."""
    if device.type != "cuda":
        return False
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    into = torch.ones(16, 16, device=device)
    try:
        torch.addmm(into, a, a, out_dtype=torch.float32, out=into)
    except (RuntimeError, TypeError):  # an older torch has no such overload, or takes 16 bits only
        return False
    return bool((into == 17).all())


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of 16-bit matrices in float32, not rounded in between."""
    if adds_wide(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float() if a.device.type == "cpu" else (a @ b).float()


_LIBRARY = torch.library.Library("graphaccel", "FRAGMENT")
_LIBRARY.define("wide_product(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("wide_product", wide_product, "CompositeExplicitAutograd")
WIDE_PRODUCT = torch.ops.graphaccel.wide_product.default


@torch.library.register_fake("graphaccel::wide_product", lib=_LIBRARY)
def _fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
