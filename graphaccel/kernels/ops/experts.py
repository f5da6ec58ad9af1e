"""Grouped matmul: multiplies each row by the weight of the expert it chose.

    y[s] = x[s] @ w[experts[s]]

Models write this as a lookup of a weight for every row and a batched matmul (Hugging Face's
`batched_mm`), which copies a matrix per token. Here rows are sorted by expert instead, and each
expert multiplies its own: as many operations as rows, and no copy of weights. A device that holds
some of the experts gets the rows that chose those (`kernels.ops.expert_rows`).

Source of the sorted form: Gale et al., MegaBlocks, MLSys 2023, §4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula


@torch.library.custom_op("graphaccel::expert_product", mutates_args=())
def expert_product(
    x: Tensor, w: Tensor, experts: Tensor, first: int, count: int, transposed: bool
) -> Tensor:
    """Rows of x [S, K] times the weights w [E, K, N] of their experts ([S], integers): [S, N].

    first: the expert that w[0] is of; rows of experts outside of [first, first + E) are zero.
    count: number of experts on all devices. transposed: w is [E, N, K].
    """
    if transposed:
        w = w.transpose(1, 2)
    key = torch.remainder(experts - first, count)
    order = torch.argsort(key, stable=True)
    built = x.new_zeros(x.shape[0], w.shape[2])
    if takes_grouped_matmul(x, w):
        ends = _ends(key, count)[: w.shape[0]]
        rows = torch.nn.functional.grouped_mm(x[order], w, offs=ends)
        own = torch.arange(x.shape[0], device=x.device) < ends[-1]
        # Rows after the last group were never written.
        built[order] = torch.where(own[:, None], rows, 0.0)
        return built
    ends = _ends(key, count).tolist()
    for e, (start, end) in enumerate(zip([0, *ends], ends[: w.shape[0]], strict=False)):
        if start < end:
            built[order[start:end]] = x[order[start:end]] @ w[e]
    return built


@expert_product.register_fake
def _(x: Tensor, w: Tensor, experts: Tensor, first: int, count: int, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1 if transposed else 2])


@torch.library.custom_op("graphaccel::expert_gradient", mutates_args=())
def expert_gradient(
    x: Tensor, g: Tensor, experts: Tensor, first: int, count: int, held: int
) -> Tensor:
    """The gradient of the weights: for each of `held` experts from `first` on, the sum of x[s]^T
    g[s] over its rows. x [S, K], g [S, N], experts [S] → [held, K, N]; zero where no row came.

    count: number of experts on all devices.
    """
    key = torch.remainder(experts - first, count)
    order = torch.argsort(key, stable=True)
    if takes_grouped_matmul(x, g):
        counts = _ends(key, count)
        built = torch.nn.functional.grouped_mm(x[order].t(), g[order], offs=counts[:held])
        came = torch.diff(counts, prepend=counts.new_zeros(1))[:held] > 0
        return torch.where(came[:, None, None], built, 0.0)
    built = x.new_zeros(held, x.shape[1], g.shape[1])
    ends = _ends(key, count).tolist()
    for e, (start, end) in enumerate(zip([0, *ends], ends[:held], strict=False)):
        if start < end:
            rows = order[start:end]
            torch.mm(x[rows].t(), g[rows], out=built[e])
    return built


@expert_gradient.register_fake
def _(x: Tensor, g: Tensor, experts: Tensor, first: int, count: int, held: int) -> Tensor:
    return x.new_empty(held, x.shape[1], g.shape[1])


def _ends(key: Tensor, count: int) -> Tensor:
    """The end of each expert's rows once sorted: int32 [count]."""
    one = torch.ones_like(key, dtype=torch.int32)
    counts = torch.zeros(count, dtype=torch.int32, device=key.device)
    return counts.index_add_(0, key, one).cumsum(0, dtype=torch.int32)


def takes_grouped_matmul(x: Tensor, w: Tensor) -> bool:
    """Whether the GPU's grouped matmul supports these: bfloat16, rows of a multiple of 16 bytes."""
    wide = all(n % 8 == 0 for n in (*x.shape[1:], *w.shape[-2:]))
    return x.is_cuda and x.dtype == torch.bfloat16 and wide and x.shape[0] > 0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, experts, ctx.first, ctx.count, ctx.transposed = inputs
    ctx.held = w.shape[0]
    ctx.save_for_backward(x, w, experts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, experts = ctx.saved_tensors
    ops = torch.ops.graphaccel
    back = weights = None
    if ctx.needs_input_grad[0]:
        back = ops.expert_product(grad, w, experts, ctx.first, ctx.count, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (grad, x) if ctx.transposed else (x, grad)
        weights = ops.expert_gradient(*pair, experts, ctx.first, ctx.count, ctx.held)
    return back, weights, None, None, None, None


expert_product.register_autograd(_backward, setup_context=_keep)
GROUPED_MATMUL, GRADIENT = (
    torch.ops.graphaccel.expert_product.default,
    torch.ops.graphaccel.expert_gradient.default,
)


if torch.ops.graphaccel.expert_product not in flop_registry:

    @register_flop_formula(torch.ops.graphaccel.expert_product)
    def _matmul_flops(
        x: Any, w: Any, experts: Any, first: int, count: int, transposed: bool, **_: Any
    ) -> Any:
        return 2 * x[0] * w[1] * w[2]

    @register_flop_formula(torch.ops.graphaccel.expert_gradient)
    def _gradient_flops(
        x: Any, g: Any, experts: Any, first: int, count: int, held: int, **_: Any
    ) -> Any:
        return 2 * x[0] * x[1] * g[1]
